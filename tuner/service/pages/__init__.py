"""Pages for people. They are made on the server, can be read without scripts, and have a strict content
security policy.
"""

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from tuner.service.pages import routes
from tuner.service.pages.render import failure, is_for_people

Handler = Callable[[Request, Exception], Response | Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Adds the pages to the app, whose `state.service` must be a `ServiceContext`. Errors become pages if a
    browser asks.
    """
    app.include_router(routes.router, include_in_schema=False)
    plain = {kind: cast(Handler, app.exception_handlers[kind]) for kind in (HTTPException, Exception)}

    async def on_http(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and is_for_people(request):
            missing = f"There is no page {request.url.path}."
            return await failure(
                request, error.status_code, missing if error.status_code == 404 else error.detail
            )
        return await _answer(plain[HTTPException], request, error)

    async def on_surprise(request: Request, error: Exception) -> Response:
        answer = await _answer(plain[Exception], request, error)
        if not is_for_people(request):
            return answer
        told = f"The service's log has it under request {request.scope.get('request_id')}."
        return await failure(request, 500, told)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_surprise)


async def _answer(handler: Handler, request: Request, error: Exception) -> Response:
    found = handler(request, error)
    return await found if isawaitable(found) else found


__all__ = ["install"]
