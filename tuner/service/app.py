"""Makes the app: `create(store, settings, clock=…, runner=…)`."""

import asyncio
import gc
import json
import logging
import logging.config
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

import structlog
from anyio import to_thread
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from starlette.middleware.gzip import GZipMiddleware

from tuner import __version__, masking
from tuner.errors import TunerError
from tuner.fleet import notify
from tuner.fleet.schedule import Happening, loop
from tuner.history.store import Store
from tuner.service import pages, problems
from tuner.service.auth import Attempts, Guard, Sessions
from tuner.service.context import ServiceContext
from tuner.service.metrics import Watcher
from tuner.service.middleware import Pulls, RequestMiddleware
from tuner.service.routes import health, profiles, runs, schedules, studies, traces
from tuner.service.routes.schedules import starter
from tuner.service.runner import Controllers
from tuner.settings import Settings

THREADS = 12
WATCH_S = 2.0
MOST_CHANGES = 600
"""Changes that a token may make in a minute, because each change adds a row to the audit."""
COMPRESS_FROM, COMPRESS_HOW = 1024, 3
log = logging.getLogger("tuner.service")
ROUTERS = (
    health.router, runs.router, runs.comparisons, studies.router, studies.trials, studies.history_router,
    profiles.router, profiles.aliases, schedules.router, health.nodes_router, traces.router,
)  # fmt: skip
ABOUT = """Tunes vLLM on your own traffic, keeps what was best on which night, and gives the winning
configuration to deploy pipelines. See docs/api.md."""


def create(
    store: Store,
    settings: Settings,
    *,
    clock: Callable[[], datetime],
    runner: Controllers,
    loopback: bool = True,
) -> FastAPI:
    """The service over a store. `loopback`: the service listens only on loopback, so it may serve without a
    token until the first token is made.
    """
    app = FastAPI(
        title="vLLM tuner",
        version=__version__,
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_lifespan,
        generate_unique_id_function=lambda route: route.name,
    )
    pulls, registry = Pulls(store.change_token, clock), CollectorRegistry()
    app.state.service = ServiceContext(
        store=store,
        settings=settings,
        clock=clock,
        runner=runner,
        guard=Guard(store, clock, loopback=loopback),
        pulls=pulls,
        sessions=Sessions(clock),
        logins=Attempts(clock, most=5, span=timedelta(minutes=1)),
        changes=Attempts(clock, most=MOST_CHANGES, span=timedelta(minutes=1)),
        refusals=Attempts(clock, most=1, span=timedelta(hours=1)),
        audited=Attempts(clock, most=200, span=timedelta(hours=1)),
    )
    registry.register(Watcher(store, clock, runner))
    app.state.registry = registry
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.add_route("/v1/openapi.json", _schema, include_in_schema=False)
    pages.install(app)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESS_FROM, compresslevel=COMPRESS_HOW)
    app.add_middleware(RequestMiddleware, pulls=pulls, registry=registry)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    to_thread.current_default_thread_limiter().total_tokens = THREADS
    # What is loaded by now stays: collections, which stop every request, need not walk it again and again.
    gc.freeze()
    here: ServiceContext = app.state.service
    tasks = [asyncio.create_task(_look_after(here)), asyncio.create_task(_nights(here))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _nights(service: ServiceContext) -> None:
    """Starts the due runs of schedules. These runs continue when the service ends, and the next service finds
    them.
    """

    def tell(found: Happening) -> None:
        log.info("schedule %s: %s: %s", found.schedule, found.kind, found.sentence)
        notify.in_background(service.settings.home, notify.happening(found), log.warning)

    await loop(service.store, clock=service.clock, start_run=starter(service), tell=tell, resumes=0)


async def _look_after(service: ServiceContext) -> None:
    """Gives runs whose controller is gone a new one. If the database cannot be reached, it tries again."""
    while True:
        try:
            for run in await to_thread.run_sync(service.runner.look_after):
                log.warning("run lost its controller", extra={"run": run.id, "state": run.state.value})
        except TunerError as error:
            log.error("looking after runs: %s", error)
        await asyncio.sleep(WATCH_S)


async def _schema(request: Request) -> Response:
    """The OpenAPI document as text. It is made only once, because it is large and anyone may ask for it."""
    state = request.app.state
    if not hasattr(state, "schema"):
        state.schema = json.dumps(request.app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()
    return Response(state.schema, media_type="application/json")


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts["Problem"] = problems.ProblemDetails.model_json_schema()
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema


def configure(level: str = "INFO") -> None:
    """All loggers of this process write JSON. Bound values (run, trial, node) and `extra` become keys.
    Secrets are masked.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter = {
        "()": structlog.stdlib.ProcessorFormatter,
        "foreign_pre_chain": shared,
        "processors": [
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            lambda _, __, event: masking.tree(event),
            structlog.processors.JSONRenderer(),
        ],
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": formatter},
            "handlers": {
                "out": {
                    "class": "logging.StreamHandler",
                    "formatter": "json",
                    "stream": "ext://sys.stdout",
                }
            },
            "root": {"handlers": ["out"], "level": level},
        }
    )
