"""`tuner serve`: the HTTP service, with the schedules."""

from typing import Annotated

import typer

from tuner.commands.common import now, open_store, say, settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; all once a token exists, loopback before.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8642,
) -> None:
    """Serve the API and the pages, and fire schedules. Runs go on when it is stopped."""
    import uvicorn

    from tuner.fleet.handover import recover_all
    from tuner.service.app import create
    from tuner.service.logs import configure
    from tuner.service.runner import Controllers

    store, ours = open_store(create=True), settings()
    tokens = bool(store.tokens())
    where = host or ("0.0.0.0" if tokens else LOOPBACK[0])
    if not tokens and where not in LOOPBACK:
        say(f"no token exists: listening on {LOOPBACK[0]} instead of {where}; 'tuner token create' makes one")
        where = LOOPBACK[0]
    elif not tokens:
        say("no token exists: whoever is on this host may do everything; 'tuner token create' ends that")
    recover_all(store, home=ours.home, clock=now, say=say)
    configure()
    app = create(store, ours, clock=now, runner=Controllers(store, ours, now), loopback=where in LOOPBACK)
    say(f"http://{where}:{port}/v1 (OpenAPI: /v1/openapi.json)")
    uvicorn.run(
        app, host=where, port=port, access_log=False, log_config=None, loop="uvloop", http="httptools",
        server_header=False, timeout_graceful_shutdown=5,
    )  # fmt: skip
