"""Templates, the words in them, and the headers of every page."""

from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from anyio import to_thread
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tuner import __version__
from tuner.errors import TunerError
from tuner.measures import many
from tuner.report import document, words
from tuner.service.pages.session import COOKIE, Away, NotAllowed, Visitor, login_url, visitor
from tuner.service.problems import status_of
from tuner.settings import runnable

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
    for name in (*document.FILTERS, "outcome_of", "run_state", "no_trial"):
        found.filters[name] = getattr(words, name)
    found.filters |= {"many": many, "runnable": runnable, "at": at, "part": part, "query": urlencode}
    found.filters |= {"breakable": document.breakable, "knobs": document.knobs}
    return found


def at(moment: datetime | None) -> Markup | str:
    """A moment as `<time>`: UTC in the text and on hover; a script writes it in the viewer's zone."""
    if moment is None:
        return "–"
    utc = moment.astimezone(UTC)
    said = f"{utc:%Y-%m-%d %H:%M} UTC"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(f"{utc:%Y-%m-%dT%H:%M:%SZ}", said, said)


def part(text: object) -> str:
    """A piece of a path."""
    return quote(str(text), safe="")


ENVIRONMENT = _environment()


def text_of(template: str, context: Mapping[str, object]) -> str:
    """A template's text."""
    return ENVIRONMENT.get_template(template).render(context)


def page(looks: Visitor, template: str, *, status: int = 200, **context: object) -> HTMLResponse:
    """A whole page for a visitor."""
    shared = {"looks": looks, "now": looks.service.clock(), "here": looks.target.partition("?")[0]}
    shared |= {"version": __version__}
    return HTMLResponse(text_of(template, shared | context), status, HEADERS)


def bare(template: str, *, status: int = 200, **context: object) -> HTMLResponse:
    """A page for nobody in particular: the login, and errors before it."""
    shared = {"looks": None, "here": "", "version": __version__}
    return HTMLResponse(text_of(template, shared | context), status, HEADERS)


def file_of(content: bytes, media: str, name: str) -> Response:
    """Something to be saved under a name."""
    headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=media, headers=headers)


def see(target: str) -> RedirectResponse:
    """After a form: look at this."""
    return RedirectResponse(target, 303, HEADERS)


class PageRoute(APIRoute):
    """A route that answers people: errors are pages with one sentence, and who must log in is sent there."""

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
    """An error as a page; with the navigation, where the visitor is known. A thread reads who that is."""
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
    """Whether a browser asks for a page, rather than a program for data."""
    path = request.url.path
    ours = not any(path == each or path.startswith(f"{each}/") for each in API)
    return ours and request.method == "GET" and "text/html" in request.headers.get("accept", "")


def marked(svg: str) -> Markup:
    """Drawn by our own charts, which escape what they write."""
    return Markup(svg)
