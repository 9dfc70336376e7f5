"""docs/knobs.md from the catalogue: `python -m benchmarks.knobs.page` prints it."""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from tuner.knobs import space as spaces
from tuner.knobs.catalogue import CATALOGUE, OLDEST, Knob, Rule, parse_version, table

HERE = Path(__file__).parent
KNOB_HEAD = ("knob", "unit or values", "releases", "default", "what it does")
PREEMPTION = (
    (
        "0.6 to 0.9",
        "V0; from 0.8 on also V1",
        "--preemption-mode recompute or swap, --swap-space; in V0 only",
        "the tuner refuses these releases",
    ),
    (
        "0.10",
        "V1, and V0 with VLLM_USE_V1=0",
        "with --preemption-mode, V1 falls back to V0 without a message (with VLLM_USE_V1=1: an error)",
        "recompute; swap:<GiB> only if engine.env sets VLLM_USE_V1=0 (then the baseline also runs in V0)",
    ),
    ("0.11.0", "V1", "--preemption-mode is gone", "recompute"),
    (
        "0.11.2 and newer",
        "V1",
        "--kv-offloading-size; until 0.17, --swap-space is accepted but does nothing",
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
        "The column `releases` says which releases of vLLM from "
        f"{table().versions[0]} to {table().versions[-1]} have the flag. Choices and defaults can depend on "
        "the release, the platform and the GPU. The first entry whose condition is true counts.",
        _table(KNOB_HEAD, map(_row, CATALOGUE.values())),
        "## Marks",
        _marks(),
        "## Preemption, release by release",
        _table(("release", "engine", "what vLLM has", "values of the knob `preemption`"), PREEMPTION),
        "## What general guides on LLM serving call these knobs",
        "vLLM 0.11 removed the V0 engine.",
        _table(("term", "knobs today", "how vLLM does it today"), _terms()),
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
    several = len(entry.choices) > 1
    listed = "; ".join(_choice(rule, several=several) for rule in entry.choices)
    if entry.kind == "int" and "<" in entry.choices[-1].versions:
        listed += "; otherwise: any number"
    return f"{entry.unit}: {listed}" if entry.unit else listed


def _choice(rule: Rule, *, several: bool) -> str:
    listed = ", ".join(str(value) for value in rule.values)
    when = rule.versions or ("otherwise" if several else "")
    return f"{when}: {listed}" if when else listed


def _releases(entry: Knob) -> str:
    if entry.kind == "preemption":
        return "see below"
    oldest = table().versions[0]
    spans = [
        "all" if first == oldest and not last else f"{first} to {last}" if last else f"{first} on"
        for first, last in entry.spans()
    ]
    if entry.env:
        spans.append(f"0.10 to 0.15 with the variable {entry.env}")
    where = f" ({', '.join(entry.platforms)})" if entry.platforms else ""
    return "; ".join(spans) + where


def _default(entry: Knob) -> str:
    found = []
    for rule in entry.default:
        when = [rule.versions, rule.platform or ""]
        when += [f"GPU memory of {rule.min_memory_gib:g} GiB or more"] if rule.min_memory_gib else []
        when += [f"not {rule.gpu_not}"] if rule.gpu_not else []
        said = ", ".join(word for word in when if word)
        value = str(rule.value).lower() if isinstance(rule.value, bool) else rule.value
        found.append(f"{value} ({said})" if said else f"otherwise {value}" if found else f"{value}")
    return "; ".join(found) or "the engine decides"


def _marks() -> str:
    def named(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    knobs = CATALOGUE.values()
    recompiles = named(entry.name for entry in knobs if entry.recompiles)
    changes = named(entry.name for entry in knobs if entry.changes_output)
    raw = named(entry.name for entry in knobs if entry.needs_raw)
    usable = [entry for entry in knobs if not _too_old(entry)]
    old = named(entry.name for entry in knobs if _too_old(entry))
    unproved = "\n".join(f"- `{entry.name}`: {entry.unproved}" for entry in usable if entry.unproved)
    never = "\n".join(f"- `{entry.name}`: {entry.never}" for entry in usable if entry.never)
    shipped = {name for each in spaces.names() for name in spaces.load(each).levels}
    free = named(entry.name for entry in knobs if not entry.never and entry.name not in shipped)
    sources: dict[str, list[str]] = {}
    for entry in knobs:
        sources.setdefault(re.split("[,;: ]", entry.source)[0], []).append(entry.name)
    listed = "\n".join(f"- {file}: {named(names)}" for file, names in sorted(sources.items()))
    return (
        "If one of these knobs changes, the engine compiles or captures its graphs again. So give these "
        f"knobs few values: {recompiles}.\n\n"
        "These knobs can change the answers of the model. So the tuner compares the answers with the "
        f"baseline's ([`quality`](tuning.md#keys-of-the-study-file)): {changes}.\n\n"
        "A replay has other text than the users' prompts. So it does not show the true effect of this knob: "
        f"{raw}.\n\n"
        "The tuner cannot read the values of these knobs from the running engine. A profile that sets one "
        f"lists it as `unproved`:\n\n{unproved}\n\n"
        "No shipped space has these knobs. If your own space has one, name it under `accept`:\n\n"
        f"{never}\n\n"
        f"No shipped space has these knobs either, but your own space can have them without `accept`: {free}."
        "\n\n"
        f"No release that the tuner supports has this flag, so no study can use it: {old}.\n\n"
        f"The file of vLLM that defines each knob (remarks are in `tuner/knobs/catalogue.yaml`):\n\n{listed}"
    )


def _too_old(entry: Knob) -> bool:
    """Whether only releases that the tuner refuses have the flag."""
    return bool(entry.spans()) and all(last and parse_version(last) < OLDEST for _, last in entry.spans())


def _terms() -> Iterable[Sequence[str]]:
    for entry in terms():
        knobs = entry["knobs"] if isinstance(entry["knobs"], list) else []
        named = ", ".join(f"`{name}`" for name in knobs) or "none"
        yield (str(entry["term"]), named, str(entry["says"]))


def _release() -> str:
    return (
        "A new release needs only new data. These commands read the wheel and add its flags to\n"
        "`tuner/data/vllm_flags.json`. The wheel is not installed and not run:\n\n"
        "```\npip download --no-deps vllm==0.33.0\n"
        "python -m benchmarks.knobs.release vllm-0.33.0-*.whl\n```\n\n"
        "A new knob, a new list of values or a new default is an entry in `tuner/knobs/catalogue.yaml`."
    )


if __name__ == "__main__":
    sys.stdout.write(document())
