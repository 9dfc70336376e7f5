"""`tuner token`: who may ask the service for what."""

import getpass
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, now, open_store, print_json, print_table, say

if TYPE_CHECKING:
    from tuner.history.store import Store

app = typer.Typer(help="Tokens of the HTTP service; only hashes are kept.", no_args_is_help=True)
DAYS = 90
UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
Reason = Annotated[str, typer.Option(help="Why; kept in the audit.")]


@app.command("create")
def create(
    name: Annotated[str, typer.Option(help="What it is for; the audit names it.")],
    scope: Annotated[
        list[str], typer.Option(help="read, run, promote or admin; repeatable. run and promote include read.")
    ],
    days: Annotated[
        int | None, typer.Option(min=1, max=3650, help=f"Worthless after so many days ({DAYS} unless given).")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="AGE", help="The same as an age, such as 12h, 90d or 4w.")
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="The token never expires.")] = False,
    reason: Reason = "made by hand",
    as_json: Json = False,
) -> None:
    """Make a token and print it; it is shown this once."""
    until = _until(days, expires, never)
    store = open_store(create=True)
    token, text = store.create_token(name, list(dict.fromkeys(scope)), now=now(), expires_at=until)
    _audit(store, "token.create", token.id, reason, name=name)
    if as_json:
        print_json({"token": token, "text": text})
        return
    life = f"until {until:%Y-%m-%d %H:%M} UTC" if until else "without an end"
    say(f"token {token.id} for '{name}' with scope {', '.join(token.scopes)}, {life}; it is shown only now:")
    typer.echo(text)


def _until(days: int | None, expires: str | None, never: bool) -> datetime | None:
    """When the token becomes worthless; None for never."""
    from tuner.errors import BadInput

    if (days is not None) + (expires is not None) + never > 1:
        raise BadInput("--days, --expires and --never: give one of them")
    if never:
        return None
    return now() + (age(expires) if expires is not None else timedelta(days=days or DAYS))


def age(text: str) -> timedelta:
    """`90d` → a span of time."""
    from tuner.errors import BadInput

    found = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", text)
    if found is None:
        raise BadInput(f"--expires {text}: a number and h, d or w, such as 90d")
    return int(found[1]) * UNITS[found[2]]


def _audit(store: "Store", action: str, target: str, reason: str, **detail: str) -> None:
    store.add_audit(
        actor=getpass.getuser(), action=action, target=target, reason=reason, now=now(), detail=detail
    )


@app.command("list")
def list_tokens(as_json: Json = False) -> None:
    """List all tokens, revoked and expired ones too."""
    found = open_store().tokens()
    if as_json:
        print_json(found)
        return
    rows = [
        [t.id, t.name, " ".join(t.scopes), t.created_at, t.expires_at, t.revoked_at, t.last_used_at]
        for t in found
    ]
    heads = ["<id", "<name", "<scopes", "<made", "<expires", "<revoked", "<last used"]
    print_table(heads, rows)


@app.command("revoke")
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="The id that `tuner token list` shows.")],
    reason: Reason = "revoked by hand",
) -> None:
    """Make a token worthless from now on."""
    store = open_store()
    store.revoke_token(token, now=now())
    _audit(store, "token.revoke", token, reason)
    say(f"token {token} is worthless now")
