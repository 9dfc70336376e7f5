"""docs/knobs.md from the catalogue: `python -m benchmarks.knobs.page` prints it."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from tuner.knobs import space as spaces
from tuner.knobs.catalogue import CATALOGUE, Knob, Rule, table

HERE = Path(__file__).parent
KNOB_HEAD = ("knob", "unit or values", "releases", "default", "what it trades")
PREEMPTION = (
    ("0.6 to 0.7", "V0", "--preemption-mode recompute or swap, --swap-space", "known and refused: too old"),
    (
        "0.8 to 0.9",
        "V1, and V0 on request",
        "--preemption-mode falls back to V0 without a message",
        "known and refused: too old",
    ),
    (
        "0.10",
        "V1, and V0 with VLLM_USE_V1=0",
        "as before; with VLLM_USE_V1=1 it is an error",
        "recompute; swap:<GiB> only if engine.env sets VLLM_USE_V1=0, also for the baseline",
    ),
    ("0.11.0", "V1", "--preemption-mode is gone", "recompute"),
    (
        "0.11.2 and newer",
        "V1",
        "--kv-offloading-size; --swap-space is parsed until 0.17 and does nothing",
        "recompute; offload:<GiB> on CUDA, ROCm and XPU",
    ),
)
"""Releases, engine, what vLLM has, what the preemption knob compiles to (vllm/engine/arg_utils.py)."""


def document() -> str:
    """The whole page."""
    parts = [
        (HERE / "page.md").read_text().rstrip(),
        "## The shipped spaces",
        _table(("space", "for", "vLLM", "knobs"), _spaces()),
        "## Every knob",
        f"The data has the releases {table().versions[0]} to {table().versions[-1]}. The column says which "
        "of them have the flag.",
        _table(KNOB_HEAD, map(_row, CATALOGUE.values())),
        "## Marks",
        _marks(),
        "## Preemption, release by release",
        _table(("release", "engine", "what it has", "what the knob does"), PREEMPTION),
        "## What the guides call it",
        _table(("term", "knobs today", "what does it"), _terms()),
        "## Adding a release",
        _release(),
    ]
    return "\n\n".join(parts) + "\n"


def terms() -> list[dict[str, object]]:
    """The dictionary of terms as shipped."""
    found: list[dict[str, object]] = yaml.safe_load((HERE / "terms.yaml").read_text())
    return found


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _spaces() -> Iterable[Sequence[str]]:
    for name in spaces.names():
        space = spaces.load(name)
        yield (f"`{name}`", space.about, space.vllm, ", ".join(space.levels))


def _row(entry: Knob) -> Sequence[str]:
    flags = " or ".join(f"`{flag}`" for flag in entry.flags)
    return (
        f"**{entry.name}** {flags}".strip(),
        _kind(entry),
        _releases(entry),
        _default(entry),
        entry.trades,
    )


def _kind(entry: Knob) -> str:
    if entry.kind == "bool":
        return "true, false"
    if entry.kind == "preemption":
        return "recompute, swap:<GiB>, offload:<GiB>"
    if not entry.choices:
        return entry.unit or {"json": "object", "text": "word"}.get(entry.kind, "number")
    return "; ".join(_choice(rule) for rule in entry.choices) + (f" {entry.unit}" if entry.unit else "")


def _choice(rule: Rule) -> str:
    listed = ", ".join(str(value) for value in rule.values)
    return f"{rule.versions}: {listed}" if rule.versions else listed


def _releases(entry: Knob) -> str:
    if entry.kind == "preemption":
        return "see below"
    oldest = table().versions[0]
    spans = [
        "all" if first == oldest and not last else f"{first} to {last}" if last else f"{first} on"
        for first, last in entry.spans()
    ]
    if entry.env:
        spans.append(f"0.10 to 0.15 by {entry.env}")
    where = f" ({', '.join(entry.platforms)})" if entry.platforms else ""
    return "; ".join(spans) + where


def _default(entry: Knob) -> str:
    found = []
    for rule in entry.default:
        when = [rule.versions, rule.platform or ""]
        when += [f"from {rule.min_memory_gib:g} GiB"] if rule.min_memory_gib else []
        when += [f"not {rule.gpu_not}"] if rule.gpu_not else []
        said = " ".join(word for word in when if word)
        value = str(rule.value).lower() if isinstance(rule.value, bool) else rule.value
        found.append(f"{value} ({said})" if said else f"{value}")
    return "; ".join(found) or "the engine decides"


def _marks() -> str:
    def named(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    knobs = CATALOGUE.values()
    recompiles = named(entry.name for entry in knobs if entry.recompiles)
    changes = named(entry.name for entry in knobs if entry.changes_output)
    raw = named(entry.name for entry in knobs if entry.needs_raw)
    unproved = "\n".join(f"- `{entry.name}`: {entry.unproved}" for entry in knobs if entry.unproved)
    never = "\n".join(f"- `{entry.name}`: {entry.never}" for entry in knobs if entry.never)
    sources = "\n".join(f"- `{entry.name}`: {entry.source}" for entry in knobs)
    return (
        "If one of these knobs changes, the engine compiles or captures again. So give them only a few "
        f"values: {recompiles}.\n\n"
        "These knobs can change the answers of the model. So a study that has one needs a `quality` section: "
        f"{changes}.\n\n"
        f"This can only be judged with the users' own prompts: {raw}.\n\n"
        "The tuner reads each knob back from the running engine, except these. A profile that has one of "
        f"them says so:\n\n{unproved}\n\n"
        "No shipped space has these knobs. If your own space has one, name it under `accept`:\n\n"
        f"{never}\n\n"
        f"The source of each:\n\n{sources}"
    )


def _terms() -> Iterable[Sequence[str]]:
    for entry in terms():
        knobs = entry["knobs"] if isinstance(entry["knobs"], list) else []
        named = ", ".join(f"`{name}`" for name in knobs) or "none"
        since = f" {str(entry['term']).capitalize()}: last in {entry['since']}." if "since" in entry else ""
        yield (str(entry["term"]), named, f"{entry['says']}{since}")


def _release() -> str:
    return (
        "A new release needs only new data. This reads the wheel (it is not installed and not run) and adds "
        "its flags to\n`tuner/data/vllm_flags.json`:\n\n"
        "```\npip download --no-deps vllm==0.33.0\n"
        "python -m benchmarks.knobs.release vllm-0.33.0-*.whl\n```\n\n"
        "A new knob, a new list of values or a new default is an entry in `tuner/knobs/catalogue.yaml`."
    )


if __name__ == "__main__":
    sys.stdout.write(document())
