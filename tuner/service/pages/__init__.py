"""Pages for people: server-rendered, readable without script, under a strict content security policy."""

from fastapi import FastAPI

from tuner.service.pages import routes


def install(app: FastAPI) -> None:
    """Adds the pages to the app, whose `state.service` must be a `ServiceContext`."""
    app.include_router(routes.router, include_in_schema=False)


__all__ = ["install"]
