"""What all pages share: templates, their words, the headers, and the limits of addresses.

Values that pages read often are computed once after each change of the history.
"""

from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import quote, urlencode
from weakref import WeakKeyDictionary

from anyio import to_thread
from fastapi import Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tuner import __version__
from tuner.errors import BadInput, TunerError, nearest
from tuner.history.store import Store
from tuner.measures import NAMES, many
from tuner.report import document, words
from tuner.service.pages.session import COOKIE, Away, NotAllowed, Visitor, login_url, visitor
from tuner.service.problems import status_of
from tuner.settings import runnable

T = TypeVar("T")
MOST = 16
_found: WeakKeyDictionary[Store, dict[str, tuple[int, object]]] = WeakKeyDictionary()
_lock = Lock()


def kept(store: Store, name: str, make: Callable[[], T]) -> tuple[T, int]:
    """(the result of `make`, the state of the history at that time). `make` is called again after the history
    has changed.
    """
    pulse = store.change_token()
    with _lock:
        ours = _found.setdefault(store, {})
        known = ours.get(name)
    if known is not None and known[0] == pulse:
        return cast(T, known[1]), pulse
    found = make()
    with _lock:
        ours.pop(name, None)
        ours[name] = (pulse, found)
        while len(ours) > MOST:
            ours.pop(next(iter(ours)))
    return found, pulse


Text = Annotated[str, Query(max_length=200)]
PageNumber = Annotated[int, Query(alias="page", ge=1, le=1_000_000)]


def measurement(name: str) -> str:
    """The name of a measurement. BadInput names the nearest one if there is none of this name."""
    if name not in NAMES:
        raise BadInput(f"'{name}' is not a measurement{nearest(name, NAMES)}")
    return name


HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader([HERE / "templates", document.HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["continues"] = words.CONTINUES
    found.globals["together"] = words.TOGETHER
    for name in (*document.FILTERS, "outcome_of", "run_state", "no_trial", "pass_name"):
        found.filters[name] = getattr(words, name)
    found.filters |= {"many": many, "runnable": runnable, "at": at, "part": part, "query": urlencode}
    found.filters |= {"breakable": document.breakable, "knobs": document.knobs}
    return found


def at(moment: datetime | None) -> Markup | str:
    """A time as `<time>`, in UTC in the text and in its title. A script converts it to the viewer's time
    zone.
    """
    if moment is None:
        return "–"
    utc = moment.astimezone(UTC)
    said = f"{utc:%Y-%m-%d %H:%M} UTC"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(f"{utc:%Y-%m-%dT%H:%M:%SZ}", said, said)


def part(text: object) -> str:
    """One part of a path, quoted."""
    return quote(str(text), safe="")


ENVIRONMENT = _environment()


def text_of(template: str, context: Mapping[str, object]) -> str:
    """A template's text."""
    return ENVIRONMENT.get_template(template).render(context)


def page(looks: Visitor, template: str, *, status: int = 200, **context: object) -> HTMLResponse:
    """A whole page for a visitor who is logged in."""
    shared = {"looks": looks, "now": looks.service.clock(), "here": looks.target.partition("?")[0]}
    shared |= {"version": __version__}
    return HTMLResponse(text_of(template, shared | context), status, HEADERS)


def bare(template: str, *, status: int = 200, **context: object) -> HTMLResponse:
    """A page without a visitor: the login, and errors before the login."""
    shared = {"looks": None, "here": "", "version": __version__}
    return HTMLResponse(text_of(template, shared | context), status, HEADERS)


def file_of(content: bytes, media: str, name: str) -> Response:
    """A download with a file name."""
    headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=media, headers=headers)


def see(target: str) -> RedirectResponse:
    """The answer to a form: a redirect to this address."""
    return RedirectResponse(target, 303, HEADERS)


class PageRoute(APIRoute):
    """A route of pages. Errors become pages with one sentence. A visitor who must log in is redirected to the
    login.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Away as away:
                return _away(request, away)
            except NotAllowed as refused:
                return await failure(request, refused.status, str(refused))
            except TunerError as error:
                return await failure(request, status_of(error), str(error))
            except RequestValidationError as error:
                return await failure(request, 422, invalid(error))

        return answer


def _away(request: Request, away: Away) -> Response:
    if request.headers.get("x-live"):
        return HTMLResponse("", 401, HEADERS)
    answer = RedirectResponse(login_url(away.target, away.reason), 303, HEADERS)
    answer.delete_cookie(COOKIE)
    return answer


TITLES = {
    400: "This cannot be shown",
    403: "Not allowed",
    404: "Not found",
    409: "Not possible now",
    422: "This address is not complete",
    500: "The service made a mistake",
}


async def failure(request: Request, status: int, sentence: str) -> HTMLResponse:
    """An error as a page, with the navigation if the visitor is known. A thread looks up the visitor."""
    return await to_thread.run_sync(_failure, request, status, sentence)


def _failure(request: Request, status: int, sentence: str) -> HTMLResponse:
    told = {"title": TITLES.get(status, "Not now"), "sentence": sentence}
    try:
        return page(visitor(request), "error.html", status=status, **told)
    except (Away, TunerError):
        return bare("error.html", status=status, **told)


def invalid(error: RequestValidationError) -> str:
    """What is wrong with an address, in one sentence."""
    first = next(iter(error.errors()), {"loc": ("address",), "msg": "not valid"})
    return f"{first['loc'][-1]}: {first['msg']}"


API = ("/v1", "/metrics", "/healthz", "/readyz", "/static")


def is_for_people(request: Request) -> bool:
    """Whether a browser asks for a page. Otherwise a program asks for data."""
    path = request.url.path
    ours = not any(path == each or path.startswith(f"{each}/") for each in API)
    return ours and request.method == "GET" and "text/html" in request.headers.get("accept", "")


def marked(svg: str) -> Markup:
    """Marks SVG text of our own charts as safe, because the charts escape what they write."""
    return Markup(svg)
