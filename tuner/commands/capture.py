"""`tuner capture`: record live traffic in front of an engine, without a word of it."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from tuner.commands.common import say, settings

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMG])I?)?B?", re.IGNORECASE)


def capture(
    upstream: Annotated[str, typer.Option(help="Where requests go: http://HOST:PORT of the engine.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A file; with --name, or where it is a directory, a directory. TUNER_HOME/captures else."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Captures NAME-<time>.jsonl; a study's `trace: latest:NAME` takes the newest."),
    ] = None,
    every: Annotated[
        Literal["hour", "day"] | None, typer.Option(help="Begin a new file each hour or day (UTC).")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Begin a new file beyond this: 500MB, 2GB.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Closed files to keep; the oldest are removed.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The model's tokenizer.json or its directory: exact lengths and blocks."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Store whole requests and answers too, personal data included.")
    ] = False,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8900,
) -> None:
    """Pass requests on to an engine and record them: times, lengths and shared prefixes, no text.

    Stops at Ctrl-C or SIGTERM, once answers under way have ended (10 s at most).
    """
    from tuner.errors import BadInput
    from tuner.traffic.capture.files import Rotation
    from tuner.traffic.capture.serving import run

    place, chosen = _place(out, name)
    rotation = Rotation(every=every, max_bytes=None if max_size is None else _bytes(max_size), keep=keep)
    if chosen is None and rotation != Rotation():
        raise BadInput("--every, --max-size and --keep need --name: they make many files of a capture")

    def ready(listening: int) -> None:
        say(f"http://{host}:{listening} passes to {upstream}; recording to {place}; Ctrl-C stops")

    counts = run(
        upstream,
        place,
        name=chosen,
        rotation=rotation,
        host=host,
        port=port,
        tokenizer=tokenizer,
        raw=raw,
        ready=ready,
    )
    say(
        f"recorded {counts.taken} requests; {counts.dropped} dropped, "
        f"{counts.not_understood} not understood, {counts.unwritten} not written"
    )


def _place(out: Path | None, name: str | None) -> tuple[Path, str | None]:
    """(file or directory, name); without a name a directory gets captures named `capture`."""
    if out is None:
        return settings().home / "captures", name or "capture"
    return out, name or ("capture" if out.is_dir() else None)


def _bytes(text: str) -> int:
    from tuner.errors import BadInput

    found = SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise BadInput(f"--max-size {text}: write a size such as 500MB or 2GB")
    power = {"": 0, "K": 1, "M": 2, "G": 3}[(found[2] or "").upper()]
    return int(float(found[1]) * 1000**power)
