"""`tuner trace` and `tuner capture`: record traffic, import it, look at it, change it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperOption

from tuner.commands.common import (
    Json,
    finite,
    now,
    open_store,
    print_json,
    print_records,
    print_table,
    print_windows,
    say,
    settings,
    store_if_any,
    text,
    windows,
    write_file,
)
from tuner.errors import BadInput, NotFound, Unavailable, nearest
from tuner.measures import many

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tuner.history.entities import TraceInfo
    from tuner.traffic.statistics import Statistics
    from tuner.traffic.trace import Trace

app = typer.Typer(help="Import, show, cut and compare traces of traffic.", no_args_is_help=True)
Ref = Annotated[
    str,
    typer.Argument(metavar="TRACE", help="A file, the name or digest of a known trace, or latest:CAPTURE."),
]


def captures() -> list[Path]:
    """The folders that `latest:NAME` searches."""
    return [settings().home / "captures", Path()]


def open_trace(ref: str) -> "tuple[Trace, Path]":
    """A trace from a file of any known format, the newest capture of a name (`latest:NAME`), or a known
    trace by name, digest or beginning of the digest.
    """
    from tuner.traffic import importers, trace_files

    path = _file(ref)
    if path.is_file():
        return importers.read_any(path), path
    stored = _stored(ref, path)
    return trace_files.find(stored.digest, stored.path)


def open_part(ref: str, choose: "Callable[[NDArray[np.float64]], tuple[int, int]]") -> "tuple[Trace, int]":
    """Rows of a trace as `open_trace` finds it, and how many it has. `choose` gives the first row and the one
    after the last by all arrivals; a file in Parquet is not read whole.
    """
    from tuner.traffic import trace, trace_files

    path = _file(ref)
    if path.is_file():
        if trace.is_parquet(path):
            return trace.read_part(path, choose)
        from tuner.traffic import importers

        whole = importers.read_any(path)
    else:
        stored = _stored(ref, path)
        if (near := trace_files.near(stored.digest, stored.path)) is not None:
            return trace.read_part(near, choose)
        whole = trace_files.find(stored.digest, stored.path)[0]
    return whole.take(range(*choose(whole.arrival_s))), len(whole)


def _file(ref: str) -> Path:
    from tuner.traffic.capture.files import find

    return find(ref, captures()) or Path(ref).expanduser()


def _stored(ref: str, path: Path) -> "TraceInfo":
    """A known trace by name or digest. NotFound names the nearest one."""
    if (store := store_if_any()) is None:
        raise NotFound(f"there is no file {path}, and no known trace yet; `tuner trace import` makes one")
    try:
        return store.trace(ref.removeprefix("latest:"))
    except NotFound:
        known = {t.name for t in store.traces()}
        raise NotFound(f"there is no file {path} and no known trace '{ref}'{nearest(ref, known)}") from None


class _ImportCommand(TyperCommand):
    """`tuner trace import`. The importers are loaded only when its help, which names them, is asked for."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from tuner.traffic.importers import importers

        mapped = " or ".join(name for name, each in importers().items() if each.columns)
        helps = {
            "format": f"One of {', '.join(importers())}. Default: what the content shows.",
            "column": f"Take NAME from this column of a {mapped} file. May be repeated.",
        }
        for each in self.params:
            if isinstance(each, TyperOption) and each.name in helps:
                each.help = helps[each.name]
        super().format_options(ctx, formatter)


@app.command("import", cls=_ImportCommand)
def import_trace(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file in any known format (found by its content), or LiteLLM's postgresql://...",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The name of the trace. Default: the name of the file.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="The format. Default: found by the content.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="Take NAME from this column of the file. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file to write. Default: a file in TUNER_HOME/traces."),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(metavar="s|ms|us|ns", help="The unit of times, if the file has plain numbers."),
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Leave out requests whose prompt and answer together have more tokens than this. The "
            "quality report counts these requests.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The model's tokenizer.json, to count the tokens of openai logs without usage."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Import a trace from a log or a data set.

    It is stored as Parquet under its name and its digest.
    """
    from tuner.traffic import importers

    columns = _columns(column or [])
    with _fetched(source) as file:
        trace = importers.read_any(file, columns, format, unit=unit, max_len=max_len, tokenizer=tokenizer)
    chosen = name or file.name.split(".")[0]
    path = output or settings().home / "traces" / f"{chosen}-{trace.digest[:12]}.parquet"
    _keep(trace, path, chosen)
    if as_json:
        told = {key: trace.meta[key] for key in ("unit", "unit_known_by") if key in trace.meta}
        print_json({"name": chosen, "digest": trace.digest, "path": path, "requests": len(trace), **told})
        return
    typer.echo(f"{_in_short(chosen, trace)}, {path}")
    if "unit" in trace.meta:
        typer.echo(f"times: read as {trace.meta['unit']} ({trace.meta['unit_known_by']})")
    quality = trace.meta.get("quality")
    if isinstance(quality, dict) and quality:
        typer.echo(f"quality: {text(quality)}")


@contextmanager
def _fetched(source: str) -> Iterator[Path]:
    """The file itself, or a temporary file with the rows of a database URL."""
    if "://" not in source:
        yield Path(source).expanduser()
        return
    from tuner.traffic.importers import litellm

    with TemporaryDirectory() as directory:
        file = Path(directory) / "litellm.jsonl"
        say(f"read {many(litellm.export(source, file), 'row')}")
        yield file


def _in_short(name: str, trace: "Trace") -> str:
    return f"{name}: {many(len(trace), 'request')} over {trace.duration_s:.0f} s, digest {trace.digest[:12]}"


def _keep(trace: "Trace", path: Path, name: str) -> None:
    from tuner.traffic import trace as traces
    from tuner.traffic import trace_files
    from tuner.traffic.structure import counted

    _check_name(name)
    trace = counted(trace)
    store = open_store(create=True)
    before = next((known.name for known in store.traces() if known.digest == trace.digest), name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        traces.write(trace, path)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror or error}") from error
    trace_files.keep(trace, settings().home, name)
    meta = {**trace.meta, "requests": len(trace), "duration_s": trace.duration_s}
    store.add_trace(trace.digest, name, str(path.resolve()), meta, now())
    if before != name:
        say(f"this trace was named '{before}'; its name is '{name}' now")


def _check_name(name: str) -> None:
    """BadInput for a text that cannot be the name of a trace, which becomes part of a file name."""

    if not name.isprintable() or set(name) & set("/\\:") or name[:1] in ("", ".", "-") or len(name) > 60:
        raise BadInput(
            f"{name!r} cannot be the name of a trace. A name may have at most 60 printable characters,"
            " no / \\ or :, and does not begin with . or -. Give another name with --name"
        )


def _columns(pairs: list[str]) -> dict[str, str] | None:

    found = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not equals:
            raise BadInput(f"--column {pair}: write NAME=COLUMN, such as input_len=prompt_tokens")
        found[ours] = theirs
    return found or None


@app.command("list")
def list_traces(as_json: Json = False) -> None:
    """List the known traces, the newest first."""
    print_records(
        open_store().traces(), ["<name", "<digest", "requests", "<taken in", "<taken from"],
        lambda t: (t.name, t.digest[:12], t.meta.get("requests"), t.created_at, t.meta.get("file") or t.path),
        as_json=as_json,
    )  # fmt: skip


@app.command("show")
def show(
    trace: Ref,
    speed: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, help="Show the numbers of a replay at this speed."),
    ] = 1.0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with pictures.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the numbers of a trace, with advice for the knobs.

    Rates, burstiness, lengths, concurrency, prefix reuse and quality.
    """
    from tuner.traffic import statistics

    found, path = open_trace(trace)
    numbers = statistics.describe(found, speed=speed)
    if html is not None:
        _picture(found, numbers, path.name, html)
    data = numbers.as_json()
    if as_json:
        print_json({"digest": found.digest, "path": path, **data})
        return
    typer.echo(f"{path}, digest {found.digest[:12]}")
    rows = [
        [name, text(value)]
        for name, value in data.items()
        if name != "advice" and value not in (None, {}, [])
    ]
    print_table(["<number", "<value"], rows)
    for sentence in data["advice"] if isinstance(data["advice"], list) else []:
        typer.echo(f"- {sentence}")


def _picture(trace: "Trace", numbers: "Statistics", name: str, place: Path) -> None:
    from tuner.report.document import trace_page

    write_file(place, trace_page(trace, numbers, name))
    say(f"wrote {place}")


@app.command("slice")
def cut(
    trace: Ref,
    start: Annotated[
        float | None,
        typer.Option(
            callback=finite, help="Where the slice begins, in seconds of the trace. Needs --duration."
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(callback=finite, help="Length of the slice in seconds. Needs --start.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write this slice as a trace.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the slices that a study would replay, or cut one.

    Without --start it shows those that `slices: auto` chooses. -o writes one slice as a trace.
    """
    from tuner.replay.plan import choose_slices, slice_rows

    found, path = open_trace(trace)
    if (start is None) != (duration is None):
        raise BadInput("give --start and --duration together")
    if start is None:
        chosen = choose_slices(found, "auto")
    elif start > found.duration_s:
        raise BadInput(
            f"--start {start:g} lies beyond the end of the trace, whose last request arrives at"
            f" {found.duration_s:g} s"
        )
    else:
        chosen = choose_slices(found, [{"start_s": start, "duration_s": duration}])
        if (over := chosen[0].start_s + chosen[0].duration_s - found.duration_s) > 0:
            say(f"the last {over:.4g} s of the slice are empty: the trace ends at {found.duration_s:g} s")
    if output is not None:
        if len(chosen) != 1:
            raise BadInput("-o writes one slice: give --start and --duration")
        _keep(found.take(slice_rows(found, chosen[0])), output, output.name.split(".")[0])
        say(f"wrote {output}")
    rows = windows(found, chosen)
    if as_json:
        print_json(rows)
        return
    print_windows(rows, title=str(path))


@app.command("reshape")
def reshape(
    trace: Ref,
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")],
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="TRACE",
            help="Another trace to merge, from the same start time. May be repeated.",
        ),
    ] = None,
    sessions: Annotated[
        bool, typer.Option("--infer-sessions", help="First find conversations by shared prefix blocks.")
    ] = False,
    beam: Annotated[
        str | None,
        typer.Option(
            metavar="sample|drop",
            help="Beam searches cannot be replayed: turn them into samples, or drop them.",
        ),
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            callback=finite,
            help="Share of the requests to keep. Conversations and groups with one prefix are not split.",
        ),
    ] = 1.0,
    copies: Annotated[
        int,
        typer.Option(
            help="Number of copies to add together. They are shifted in time and share no prefixes."
        ),
    ] = 1,
    speed: Annotated[
        float, typer.Option(callback=finite, help="Speed factor: 2 sends the same requests in half the time.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for --share and for the shifts of the copies.")] = 0,
) -> None:
    """Write a new trace that is denser, thinner or faster.

    The options apply in this order: --with, --infer-sessions, --beam, --share, --copies, --speed.
    """
    from tuner.traffic import structure

    found = open_trace(trace)[0]
    if also:
        found = structure.merged([found, *(open_trace(one)[0] for one in also)])
    if beam is not None:
        found = structure.without_beams(found, beam)
    if sessions:
        found = structure.infer_sessions(found)
    if share != 1.0:
        found = structure.thinned(found, share, seed)
    if copies != 1:
        found = structure.superposed(found, copies, seed)
    if speed != 1.0:
        found = structure.scaled(found, speed)
    name = output.name.split(".")[0]
    _keep(found, output, name)
    typer.echo(_in_short(name, found))


@app.command("diff")
def diff(before: Ref, after: Ref, as_json: Json = False) -> None:
    """Show what changed between two traces.

    Rate, lengths, mix and reuse, each with the size of the change.
    """
    from tuner.traffic import statistics

    found = statistics.compare(open_trace(before)[0], open_trace(after)[0])
    if as_json:
        print_json(found)
        return
    rows = ([each.name, each.before, each.after, f"{each.change:+.1%}" if each.change is not None else None,
             "moved" if each.moved else ""] for each in found)  # fmt: skip
    print_table(["<number", "before", "after", "change", "<moved"], rows)
    moved = [each.sentence for each in found if each.moved]
    for sentence in moved or [
        "no number has changed by 10 % or more (shares: 5 percentage points) and by more than chance explains"
    ]:
        typer.echo(f"- {sentence}")


@app.command("forget")
def forget(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="The name or digest of a known trace.")],
) -> None:
    """Remove a trace from the list of known traces. Its file and its studies stay."""
    store = open_store()
    stored = store.trace(trace)
    store.forget_trace(stored.digest)
    typer.echo(
        f"{stored.name} ({stored.digest[:12]}) is removed from the list; its file stays: {stored.path}"
    )


SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMG])I?)?B?", re.IGNORECASE)


Upstream = Annotated[str, typer.Option(help="Where requests go: http://HOST:PORT of the engine.")]
Out = Annotated[
    Path | None,
    typer.Option(help="The file to write. With --name, a directory. Default: TUNER_HOME/captures."),
]
CaptureName = Annotated[
    str | None,
    typer.Option(help="Write NAME-<time>.jsonl. In a study, `trace: latest:NAME` uses the newest file."),
]
Every = Annotated[
    Literal["hour", "day"] | None, typer.Option(help="Begin a new file each hour or day (UTC).")
]
MaxSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Begin a new file at this size, such as 500MB.")
]
Keep = Annotated[
    int | None, typer.Option(min=1, help="Number of closed files to keep; the oldest are removed.")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="The model's tokenizer.json or its directory, for exact lengths and blocks."),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Also store whole requests and answers, personal data included.")
]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")]


def capture(
    upstream: Upstream,
    out: Out = None,
    name: CaptureName = None,
    every: Every = None,
    max_size: MaxSize = None,
    keep: Keep = None,
    tokenizer: Tokenizer = None,
    raw: Raw = False,
    host: Host = "127.0.0.1",
    port: Port = 8900,
) -> None:
    """Record the traffic of a running engine, without its text.

    A proxy forwards the requests and records their times, lengths and shared prefixes.
    Ctrl-C or SIGTERM stops it after the current answers have ended (10 s at most).
    """
    from tuner.traffic.capture.files import Rotation
    from tuner.traffic.capture.proxy import run

    place, chosen = _place(out, name)
    rotation = Rotation(every=every, max_bytes=None if max_size is None else _bytes(max_size), keep=keep)
    if chosen is None and rotation != Rotation():
        raise BadInput("--every, --max-size and --keep need --name: they split a capture into files")

    def ready(listening: int) -> None:
        say(f"http://{host}:{listening} forwards to {upstream} and records to {place}; Ctrl-C stops it")

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
        f"recorded {many(counts.taken, 'request')}; {counts.dropped} dropped, "
        f"{counts.not_understood} not understood, {counts.unwritten} not written"
    )


def _place(out: Path | None, name: str | None) -> tuple[Path, str | None]:
    """(file or directory, name); without a name a directory gets captures named `capture`."""
    if out is None:
        return settings().home / "captures", name or "capture"
    return out, name or ("capture" if out.is_dir() else None)


def _bytes(text: str) -> int:

    found = SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise BadInput(f"--max-size {text}: write a size such as 500MB or 2GB")
    power = {"": 0, "K": 1, "M": 2, "G": 3}[(found[2] or "").upper()]
    return int(float(found[1]) * 1000**power)
