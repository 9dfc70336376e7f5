"""`tuner serve` and `tuner token`: the HTTP service, and the tokens of its clients."""

import getpass
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, now, open_store, print_json, print_records, say, settings
from tuner.errors import BadInput, Conflict, Unavailable

if TYPE_CHECKING:
    import socket

    from tuner.history.store import Store

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on. Default: all addresses while a token is valid, otherwise loopback."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8642,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", help="Serve HTTPS with this PEM file (certificate and its chain)."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="PEM file with the certificate's key, without password.")
    ] = None,
) -> None:
    """Serve the API and the pages, and start scheduled runs. Runs continue when the service stops."""
    import signal
    import sys

    import uvicorn

    from tuner.fleet.handover import recover_all
    from tuner.processes import allow_files
    from tuner.service.app import configure, create
    from tuner.service.connections import TimedHead
    from tuner.service.runner import Controllers

    # The server closes what is open, then raises the signal that stopped it once more: an orderly end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    check_tls(tls_cert, tls_key)
    store, ours = open_store(create=True), settings()
    where = address(store, host)
    if where not in LOOPBACK and tls_cert is None:
        say(f"warning: tokens are sent to {where} unencrypted: give --tls-cert and --tls-key, or use a proxy")
    listener = listen(where, port)
    allow_files()
    recover_all(store, home=ours.home, clock=now, say=say)
    configure()
    app = create(store, ours, clock=now, runner=Controllers(store, ours, now), loopback=where in LOOPBACK)
    page = link(where, port, secure=tls_cert is not None)
    say(f"open {page}  (listening on {where}; Ctrl-C stops the service, not its runs)")
    server = uvicorn.Server(uvicorn.Config(
        app, host=where, port=port, access_log=False, log_config=None, loop="tuner.service.connections:Loop",
        http=TimedHead, server_header=False, timeout_graceful_shutdown=5, ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    ))  # fmt: skip
    server.run(sockets=[listener])
    if not server.started:
        raise Unavailable("the service did not start: the log above has the reason")


def link(host: str, port: int, *, secure: bool) -> str:
    """The address of the pages, as a browser opens it."""
    import socket

    named = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{named}:{port}/"


def listen(host: str, port: int) -> "socket.socket":
    """The socket to serve on. Conflict if the port is in use, BadInput if the address cannot
    be used.
    """
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
    """BadInput if the two files are not a certificate and its key."""
    import ssl

    if (cert is None) != (key is None):
        raise BadInput("--tls-cert and --tls-key: give both")
    if cert is None or key is None:
        return
    try:
        # An empty password: a key that has one would ask on the terminal, and a unit has none.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"--tls-cert {cert}, --tls-key {key}: not a certificate and its key: {why}") from error


def address(store: "Store", host: str | None) -> str:
    """The address to listen on. Without a valid token it is loopback, and a message says why."""
    tokens = store.tokens()
    if any(token.valid(now()) for token in tokens):
        return host or "0.0.0.0"
    why = "no token is valid (all are revoked or expired)" if tokens else "no token exists"
    where = host or LOOPBACK[0]
    if where not in LOOPBACK:
        say(f"{why}: listening on {LOOPBACK[0]} instead of {where}; 'tuner token create' makes one")
        return LOOPBACK[0]
    if tokens:
        say(f"{why}: every request is refused until 'tuner token create' makes one")
    else:
        say(f"{why}: everyone on this host may do everything. 'tuner token create' ends this")
    return where


token_app = typer.Typer(help="Create, list and revoke tokens. Only hashes are stored.", no_args_is_help=True)
DAYS = 90
UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
Reason = Annotated[str, typer.Option(help="The reason, which is stored in the audit.")]


@token_app.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="A name that says what the token is for. The audit shows it.")],
    scope: Annotated[
        list[str],
        typer.Option(help="read, run, promote or admin. run and promote include read. May be repeated."),
    ],
    days: Annotated[
        int | None, typer.Option(min=1, max=3650, help=f"Days until it expires. Default: {DAYS}.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="AGE", help="The time until it expires, such as 12h, 90d or 4w.")
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="The token never expires.")] = False,
    reason: Reason = "made by hand",
    as_json: Json = False,
) -> None:
    """Make a token and print it. It is shown only once."""
    until = _until(days, expires, never)
    store = open_store(create=True)
    token, text = store.create_token(name, list(dict.fromkeys(scope)), now=now(), expires_at=until)
    _audit(store, "token.create", token.id, reason, name=name)
    if as_json:
        print_json({"token": token, "text": text})
        return
    life = f"until {until:%Y-%m-%d %H:%M} UTC" if until else "without an end"
    say(
        f"token {token.id} for '{name}' with scope {', '.join(token.scopes)}, {life}."
        " Copy it, because it is shown only now:"
    )
    typer.echo(text)


def _until(days: int | None, expires: str | None, never: bool) -> datetime | None:
    """When the token expires; None for never."""

    if (days is not None) + (expires is not None) + never > 1:
        raise BadInput("give only one of --days, --expires and --never")
    if never:
        return None
    return now() + (age(expires) if expires is not None else timedelta(days=days or DAYS))


def age(text: str) -> timedelta:
    """`90d` → a span of time."""

    found = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", text)
    if found is None:
        raise BadInput(f"--expires {text}: write a number and h, d or w, such as 90d")
    return int(found[1]) * UNITS[found[2]]


def _audit(store: "Store", action: str, target: str, reason: str, **detail: str) -> None:
    store.add_audit(
        actor=getpass.getuser(), action=action, target=target, reason=reason, now=now(), detail=detail
    )


@token_app.command("list")
def list_tokens(as_json: Json = False) -> None:
    """List all tokens, revoked and expired ones too."""
    print_records(
        open_store().tokens(),
        ["<id", "<name", "<scopes", "<made", "<expires", "<revoked", "<last used"],
        lambda t: (
            t.id, t.name, " ".join(t.scopes), t.created_at, t.expires_at, t.revoked_at, t.last_used_at,
        ),
        as_json=as_json,
    )  # fmt: skip


@token_app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(metavar="ID", help="The id that `tuner token list` shows.")],
    reason: Reason = "revoked by hand",
) -> None:
    """Revoke a token: it is not valid any more."""
    store = open_store()
    store.revoke_token(token, now=now())
    _audit(store, "token.revoke", token, reason)
    say(f"token {token} is revoked")
