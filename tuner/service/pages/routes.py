"""The addresses of the pages. Every page can be linked. Its content is made in the module beside this one."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse

from tuner.errors import NotFound
from tuner.profiles import export, registry
from tuner.profiles.export import slug
from tuner.records import ProfileKey
from tuner.report import document
from tuner.report.board import attempts_of, baselines, failures, measured_at
from tuner.report.evidence import log_path, root_cause, tail, to_screen
from tuner.service.auth import client_of
from tuner.service.context import service_of
from tuner.service.pages import bench, compare, history, overview, profiles, studies
from tuner.service.pages.render import (
    HEADERS,
    HERE,
    PageNumber,
    PageRoute,
    Text,
    bare,
    file_of,
    kept,
    page,
    see,
    text_of,
)
from tuner.service.pages.session import COOKIE, OVER, Form, Looks, SignedForm, local
from tuner.service.pages.studies import board_of, phase_in

log = logging.getLogger("tuner.service")
router = APIRouter(route_class=PageRoute)
STATIC = {
    "style.css": (Path(document.__file__).parent / "style.css", "text/css"),
    "pages.css": (HERE / "static" / "pages.css", "text/css"),
    "times.js": (HERE / "static" / "times.js", "text/javascript"),
    "icon.svg": (HERE / "static" / "icon.svg", "image/svg+xml"),
    "live.js": (HERE / "static" / "live.js", "text/javascript"),
    "copy.js": (HERE / "static" / "copy.js", "text/javascript"),
    "bench.js": (HERE / "static" / "bench.js", "text/javascript"),
    "marks.js": (Path(document.__file__).parent / "report.js", "text/javascript"),
}
LOG_LINES = 60


@router.get("/static/{name}")
def static(name: str) -> Response:
    """A style sheet or script."""
    if name not in STATIC:
        raise NotFound(f"there is no file '{name}'")
    path, media = STATIC[name]
    return Response(path.read_bytes(), media_type=media, headers={**HEADERS, "Cache-Control": "max-age=300"})


@router.get("/login")
def ask_token(
    target: Annotated[str, Query(alias="next", max_length=2000)] = "/", expired: str = ""
) -> Response:
    """The login page: the form for a token."""
    problem = f"{OVER} Log in again." if expired else ""
    return bare("login.html", target=local(target), problem=problem)


@router.post("/login")
def take_token(request: Request, fields: Form) -> Response:
    """Begins a session for a valid token. The session's id goes into a cookie that scripts cannot read."""
    service, client = service_of(request), client_of(request)
    text, target = fields.get("token", "").strip(), local(fields.get("next", "/"))
    if wait_s := service.logins.wait_s(client):
        problem = f"Too many tokens that are not valid came from your address. Try again in {wait_s} s."
        answer = bare("login.html", status=429, target=target, problem=problem)
        answer.headers["Retry-After"] = str(wait_s)
        return answer
    actor = service.guard.identify(text)
    if actor is None:
        service.login_failed(client)
        problem = "This token is not valid: it has expired, was revoked, or is not known here."
        return bare("login.html", status=401, target=target, problem=problem)
    service.sessions.end(request.cookies.get(COOKIE, ""))
    service.audit(replace(actor, client=client), "login", "pages", "logged in with the token")
    log.info("login", extra={"actor": actor.name, "client": client})
    return _with_cookie(see(target), service.sessions.begin(text), secure=request.url.scheme == "https")


def _with_cookie(answer: Response, word: str, *, secure: bool) -> Response:
    answer.set_cookie(COOKIE, word, httponly=True, samesite="strict", secure=secure, path="/")
    return answer


@router.post("/logout")
def leave(request: Request, looks: Looks, fields: SignedForm) -> Response:
    """Ends the session, in this browser and in every other browser that has its id."""
    looks.service.sessions.end(request.cookies.get(COOKIE, ""))
    log.info("logout", extra={"actor": looks.actor.name, "client": looks.actor.client})
    answer = see("/login")
    answer.delete_cookie(COOKIE, path="/")
    return answer


@router.get("/")
def show_overview(looks: Looks) -> Response:
    """Every node with its champion."""
    store = looks.service.store
    found = overview.machines(store, looks.service.clock())
    named = overview.comparable(found)
    return page(looks, "overview.html", machines=found, compared=named, stopped=looks.service.stopped_runs())


@router.get("/studies")
def list_studies(looks: Looks, after: Text = "") -> Response:
    """Studies, the newest first, a page at a time; `after` is the id of the last one of the page before."""
    store = looks.service.store
    found = store.studies(after=after or None, limit=studies.LISTED + 1)
    shown = found[: studies.LISTED]
    runs = {study.id: next(iter(store.runs(study.id, limit=1)), None) for study in shown}
    said = {run.id: store.conclusion(run.id) for run in runs.values() if run is not None}
    return page(
        looks,
        "studies.html",
        studies=shown,
        runs=runs,
        said=said,
        after=after,
        more=len(found) > len(shown),
        stopped=looks.service.stopped_runs(),
    )


@router.get("/studies/{ref}")
def show_study(looks: Looks, ref: str, x: Text = "", y: Text = "", number: PageNumber = 1) -> Response:
    """A study: its answer, its live part and its front. `page` belongs to an older address: now all trials
    have a page of their own.
    """
    store = looks.service.store
    study = studies.find(store, ref)
    if number > 1:
        return see(f"/studies/{study.id[:16]}/trials?page={number}")
    axes = studies.axes_of(x, y)
    live = studies.live(looks.service, study, axes)
    return page(
        looks,
        "study.html",
        study=study,
        live=live,
        axes=axes,
        names=studies.measured_names(live.board),
        budget=studies.budget(live.board),
        failures=failures(live.board.trials, store.launches(study.id)),
        link=studies.link,
        links=studies.card_links(study, live.board),
    )


@router.post("/studies/{ref}/cancel")
def cancel_run(looks: Looks, fields: SignedForm, ref: str) -> Response:
    """Asks a study's run to stop."""
    study = studies.find(looks.service.store, ref)
    studies.cancel(looks, study, fields)
    return see(f"/studies/{study.id[:16]}")


@router.get("/studies/{ref}/live")
def show_live(request: Request, looks: Looks, ref: str, x: Text = "", y: Text = "") -> Response:
    """Only the live part; 304 if nothing has changed."""
    store = looks.service.store
    study = studies.find(store, ref)
    axes = studies.axes_of(x, y)
    tag, unended = studies.tag_of(looks.service, study)
    headers = {**HEADERS, "ETag": tag, "X-Running": "1" if unended else "0"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    live = studies.live(looks.service, study, axes)
    headers |= {"ETag": live.tag, "X-Running": "1" if live.unended else "0"}
    context: dict[str, object] = {"study": study, "live": live, "link": studies.link}
    context["now"] = looks.service.clock()
    context["links"] = studies.card_links(study, live.board)
    return HTMLResponse(text_of("live.html", context), headers=headers)


Asked = Annotated[bench.BenchQuery, Depends()]


@router.get("/studies/{ref}/trials")
def show_trials(request: Request, looks: Looks, asked: Asked, ref: str) -> Response:
    """All trials of a study, to sort, filter, compare and download."""
    study = studies.find(looks.service.store, ref)
    held = studies.bench_of(looks.service.store, study)
    seen = bench.view(held, asked, lambda trial: studies.link(study, trial))
    files, stopped = list(bench.FILES), looks.service.stopped_runs()
    if request.headers.get("x-live"):
        part = {"study": study, "seen": seen, "link": studies.link, "files": files, "stopped": stopped}
        return HTMLResponse(text_of("bench_part.html", part), headers=HEADERS)
    effects = {name: held.importance(name) for name in study.objectives}
    return page(
        looks,
        "bench.html",
        study=study,
        seen=seen,
        link=studies.link,
        files=files,
        effects=effects,
        stopped=stopped,
    )


@router.get("/studies/{ref}/trials.{ending}")
def download_trials(looks: Looks, asked: Asked, ref: str, ending: str) -> Response:
    """The matching trials in their order as a file."""
    study = studies.find(looks.service.store, ref)
    content, media = bench.download(studies.bench_of(looks.service.store, study), asked, ending)
    return file_of(content, media, f"{slug(study.name)}-{study.id[:8]}-trials.{ending}")


@router.get("/studies/{ref}/trials/{number}")
def show_trial(looks: Looks, ref: str, number: int, attempt: int | None = None) -> Response:
    """One trial: configuration, numbers and pictures, and how far its numbers can be trusted."""
    store = looks.service.store
    study = studies.find(store, ref)
    board, _ = board_of(store, study)
    trial, attempts = attempts_of(board.study, board.trials, number, attempt)
    latencies, timelines = studies.pictures(board, trial)
    launches = store.launches(study.id)
    beside = baselines(board.base, trial, launches)
    log = log_path(trial, launches)
    return page(
        looks,
        "trial.html",
        study=study,
        board=board,
        trial=trial,
        attempts=attempts,
        latencies=latencies,
        timelines=timelines,
        log=tail(log, LOG_LINES),
        to_screen=to_screen(trial, launches),
        root=root_cause(trial, log) if trial.reason else "",
        rows=studies.numbers(board, trial),
        beside=beside,
        beside_times=measured_at(board.base, beside, launches),
        times=measured_at(trial, trial.measurements, launches),
        phase=phase_in(looks.service.settings.home, trial),
        stopped=looks.service.stopped_runs(),
    )


@router.get("/history")
def show_history(looks: Looks, asked: Annotated[history.HistoryQuery, Depends()]) -> Response:
    """What each night found, some nodes to a page; `after` is the last node of the page before."""
    store = looks.service.store
    told, _ = kept(store, f"history {asked}", lambda: history.tell(store, asked))
    return page(looks, "history.html", told=told, stopped=looks.service.stopped_runs())


@router.get("/compare")
def show_comparison(looks: Looks, asked: Annotated[compare.CompareQuery, Depends()]) -> Response:
    """Two to five trials, profiles, nights or nodes side by side."""
    return page(looks, "compare.html", told=compare.compare(looks.service.store, asked))


@router.get("/profiles")
def list_profiles(looks: Looks, model: Text = "", target: Text = "", workload: Text = "") -> Response:
    """Every profile key with its newest versions; all versions of the key that was chosen."""
    named = ProfileKey(model=model, target=target, workload=workload) if model or target or workload else None
    return page(looks, "profiles.html", shelves=profiles.shelves(looks.service.store, named), named=named)


@router.get("/profiles/{profile_id}")
def show_profile(looks: Looks, profile_id: int, moved: Text = "") -> Response:
    """One version: evidence, difference to the champion, and the forms that move it."""
    store = looks.service.store
    found = profiles.sheet(store, store.profile(profile_id), looks.service.clock())
    return page(looks, "profile.html", sheet=found, moved=moved, formats=list(export.FORMATS))


@router.get("/profiles/{profile_id}/file")
def download_profile(looks: Looks, profile_id: int, format: Text = "vllm-yaml") -> Response:
    """A version as a file in one of the formats that deploy pipelines read."""
    profile = looks.service.store.profile(profile_id)
    chosen = export.format_of(format)
    ending = "json" if chosen.name == "json" else "yaml" if chosen.media == export.YAML else "txt"
    name = f"{slug(profile.key.model)}-{slug(profile.key.target)}-v{profile.version}-{chosen.name}.{ending}"
    return file_of(export.render(profile, chosen.name).encode(), chosen.media, name)


@router.get("/profiles/{one}/diff/{other}")
def show_diff(looks: Looks, one: int, other: int) -> Response:
    """What differs between two versions."""
    store = looks.service.store
    before, after = store.profile(one), store.profile(other)
    return page(
        looks,
        "diff.html",
        before=before,
        after=after,
        changes=registry.diff(before, after),
        lines=profiles.argv_diff(before, after),
        card=overview.card_of_profile(store, after, ""),
        moves=profiles.moves_to(store, after),
    )


@router.post("/profiles/{profile_id}/promote")
def promote(looks: Looks, fields: SignedForm, profile_id: int) -> Response:
    """Makes a version the champion."""
    moved = profiles.promote(looks, looks.service.store.profile(profile_id), fields)
    return see(f"/profiles/{profile_id}?moved={moved.to_version}")


@router.post("/profiles/{profile_id}/rollback")
def rollback(looks: Looks, fields: SignedForm, profile_id: int) -> Response:
    """Moves the champion of this version's key back."""
    moved = profiles.rollback(looks, looks.service.store.profile(profile_id), fields)
    return see(f"/profiles/{profile_id}?moved={moved.to_version}")


@router.get("/schedules")
def show_schedules(looks: Looks) -> Response:
    """Every schedule with its next window."""
    plans = overview.plans(looks.service.store, looks.service.clock())
    return page(looks, "schedules.html", plans=plans, stopped=looks.service.stopped_runs())
