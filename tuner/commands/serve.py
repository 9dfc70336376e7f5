"""`tuner serve`: the HTTP service, with the schedules."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import now, open_store, say, settings
from tuner.errors import BadInput, Conflict, Unavailable

if TYPE_CHECKING:
    import socket

    from tuner.history.store import Store

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; all while a token is valid, loopback else.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8642,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="PEM file with the certificate and its chain: HTTPS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="PEM file with the certificate's key, without password.")
    ] = None,
) -> None:
    """Serve the API and the pages, and fire schedules. Runs go on when it is stopped."""
    import signal
    import sys

    import uvicorn

    from tuner.fleet.handover import recover_all
    from tuner.service.app import create
    from tuner.service.logs import configure
    from tuner.service.runner import Controllers

    # The server closes what is open, then raises the signal that stopped it once more: an orderly end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    check_tls(tls_cert, tls_key)
    store, ours = open_store(create=True), settings()
    where = address(store, host)
    if where not in LOOPBACK and tls_cert is None:
        say(f"warning: tokens travel in clear to {where}: give --tls-cert and --tls-key, or use a TLS proxy")
    listener = listen(where, port)
    recover_all(store, home=ours.home, clock=now, say=say)
    configure()
    app = create(store, ours, clock=now, runner=Controllers(store, ours, now), loopback=where in LOOPBACK)
    say(f"{'https' if tls_cert else 'http'}://{where}:{port}/v1 (OpenAPI: /v1/openapi.json)")
    server = uvicorn.Server(uvicorn.Config(
        app, host=where, port=port, access_log=False, log_config=None, loop="uvloop", http="httptools",
        server_header=False, timeout_graceful_shutdown=5, ssl_certfile=tls_cert, ssl_keyfile=tls_key,
    ))  # fmt: skip
    server.run(sockets=[listener])
    if not server.started:
        raise Unavailable("the service did not start: its log above says why")


def listen(host: str, port: int) -> "socket.socket":
    """The socket to serve on. Conflict where the port is taken, BadInput where it cannot be had at all."""
    import errno
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(
                f"port {port} of {host} is taken by another program: end it, or give another --port"
            ) from error
        reason = error.strerror or error
        raise BadInput(
            f"cannot listen on {host}, port {port}: {reason}; give another --host or --port"
        ) from error


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raises BadInput where the two files are not a certificate and its key."""
    import ssl

    from tuner.errors import BadInput

    if (cert is None) != (key is None):
        raise BadInput("--tls-cert and --tls-key: give both or none")
    if cert is None or key is None:
        return
    try:
        # An empty password: a key that has one would ask on the terminal, and a unit has none.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"--tls-cert {cert}, --tls-key {key}: no certificate with its key: {why}") from error


def address(store: "Store", host: str | None) -> str:
    """Where to listen: loopback while no token is valid, whatever was asked for; says why."""
    tokens = store.tokens()
    if any(token.valid(now()) for token in tokens):
        return host or "0.0.0.0"
    why = "no token is valid (all are revoked or expired)" if tokens else "no token exists"
    where = host or LOOPBACK[0]
    if where not in LOOPBACK:
        say(f"{why}: listening on {LOOPBACK[0]} instead of {where}; 'tuner token create' makes one")
        return LOOPBACK[0]
    if tokens:
        say(f"{why}: nobody may ask for anything until 'tuner token create' makes one")
    else:
        say(f"{why}: whoever is on this host may do everything; 'tuner token create' ends that")
    return where
