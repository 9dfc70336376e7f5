"""Reads the command line of a running engine as the baseline of a study: knobs, arguments, environment."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner import masking, yamltext
from tuner.errors import BadInput, nearest
from tuner.knobs import catalogue, shell
from tuner.knobs.catalogue import CATALOGUE, SHORT, Knob, matches, negation, table, written
from tuner.knobs.configfile import argv_of_mapping, documents
from tuner.knobs.space import SearchSpace
from tuner.records import Candidate, EngineFacts, Value

ALIASES = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
}

# Flags that the tuner sets for every launch, or that do not belong into a study.
OURS = re.compile(r"--(model|host|port|uds|served-model-name|api-key|ssl-.+|root-path|config)")

# Flags that vLLM has removed, and their successors.
GONE = {
    "--swap-space": "V1 recomputes preempted requests; --kv-offloading-size keeps KV blocks in host memory",
    "--preemption-mode": "requests are always recomputed",
    "--disable-log-requests": "requests are not logged unless --enable-log-requests is given",
    "--use-v2-block-manager": "V1 has only this block manager",
    "--num-scheduler-steps": "--async-scheduling lets steps overlap",
    "--multi-step-stream-outputs": "--async-scheduling lets steps overlap",
    "--disable-async-output-proc": "nothing does the same",
    "--enable-reasoning": "--reasoning-parser alone turns it on",
    "--guided-decoding-backend": "use --structured-outputs-config",
    "--task": "use --runner and --convert",
    "--speculative-model": "use --speculative-config",
    "--num-speculative-tokens": "use --speculative-config",
    "--ngram-prompt-lookup-max": "use --speculative-config",
    "--worker-use-ray": "--distributed-executor-backend ray",
    "--device": "vLLM finds the platform itself",
    "--rope-scaling": "use --hf-overrides",
    "--rope-theta": "use --hf-overrides",
    "--max-seq-len-to-capture": "--cudagraph-capture-sizes",
    "--scheduler-delay-factor": "nothing does the same",
    "--override-pooler-config": "--pooler-config",
    "--calculate-kv-scales": "the scales are in the checkpoint",
}

Argument = Value | list[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A running configuration. `candidate` holds the knobs, `args` the other arguments (names with dashes,
    without `--`). `notes` list what was left out or is uncertain.
    """

    source: str
    name: str = ""
    model: str | None = None
    candidate: Candidate = field(default_factory=Candidate)
    args: Mapping[str, Argument] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def study(self, space: SearchSpace | None = None) -> dict[str, Any]:
        """The keys of a study file that this configuration fills.

        Knobs of the space are the baseline. The other knobs are fixed arguments, since every candidate keeps
        them. Without a space, knobs that change the answers or are never turned are fixed.
        """
        turned, fixed = dict[str, Value](), dict[str, Any]()
        for name, value in self.candidate.items():
            entry = CATALOGUE[name]
            if name in space.levels if space else not entry.changes_output and entry.never is None:
                turned[name] = value
            else:
                decoded = json.loads(str(value)) if entry.kind in ("ints", "json") else value
                fixed[entry.flags[0][2:]] = decoded
        engine = {"args": {**fixed, **self.args}, "env": dict(self.env)}
        study: dict[str, Any] = {"model": self.model} if self.model else {}
        return {**study, "baseline": turned, "engine": {key: value for key, value in engine.items() if value}}


def from_arguments(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    source: str,
    name: str = "",
    facts: EngineFacts | None = None,
) -> Imported:
    """A configuration from the arguments of vLLM, a positional model first.

    `facts` has the exact flags of the engine; without it, the flags of all known releases are accepted.
    BadInput names an argument that no release has.
    """
    notes: list[str] = []
    environment = dict(env)
    # KServe's images and the tuner's own systemd units add the words of this variable.
    added = shell.split(environment.pop("VLLM_ADDITIONAL_ARGS", ""), source, by_shell=False)
    arguments = [shell.expanded(word, environment) for word in (*words, *added)]
    positional = [arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    known = facts.flags if facts else {*table().flags, *map(negation, table().paired)}
    read = pairs(long_form(arguments), notes)
    if not positional and not any(flag == "--model" for flag, _ in read):
        positional = [last] if (last := model_at_the_end(read)) is not None else []
    given = _given(read, known, notes, source)
    _check_switches(given, facts, notes, source)
    given = {**_config(given, known, notes, source), **given}
    named = [word for word in positional or given.get("--model", []) if not shell.unknown(word)]
    if positional and not named:
        notes.append(f"the model {shell.plain(positional[0])} has no known value here; write its name")
    knobs, args = _sorted_out(given, notes, source)
    kept = _without_secrets(environment, notes)
    return Imported(
        source=source,
        name=name,
        model=shell.plain(named[0]) if named else None,
        candidate=Candidate(knobs),
        args=args,
        env=kept,
        notes=tuple(notes),
    )


def _without_secrets(env: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """The variables that a study may contain. Notes name the others."""
    kept: dict[str, str] = {}
    for name, value in env.items():
        if masking.value(name, value) != value:
            notes.append(f"{name} is a secret and is not imported")
        elif shell.unknown(value):
            notes.append(f"{name}={shell.plain(value)} has no known value and is left out")
        else:
            kept[name] = shell.plain(value)
    return kept


def long_form(words: Iterable[str]) -> list[str]:
    """Short flags as long ones; `-O2` as two words."""
    found: list[str] = []
    for word in words:
        level = re.fullmatch(r"-O\.?(\d)", word)
        if level:
            found += ["--optimization-level", level[1]]
        elif short := re.fullmatch(r"(-[A-Za-z]+)([.=].*)", word, re.DOTALL):
            found.append(SHORT.get(short[1], short[1]) + short[2])
        else:
            found.append(SHORT.get(word, word))
    return found


def pairs(argv: Sequence[str], notes: list[str]) -> list[tuple[str, list[str]]]:
    """Long flags of an argv with their values; `--flag=value` is split. Flags with an unknown value are left
    out, with a note. BadInput for a value without a flag.
    """
    found: list[tuple[str, list[str]]] = []
    lost: set[int] = set()
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            name, dot, key = flag.partition(".")
            found.append((name.replace("_", "-") + dot + key, [value] if equals else []))
            if shell.unknown(value):
                lost.add(len(found) - 1)
        elif shell.unknown(word) and (not found or found[-1][1] or is_switch(found[-1][0])):
            notes.append(f"'{shell.plain(word)}' has no known value, so its arguments are missing")
        elif not found:
            raise BadInput(f"argument '{shell.plain(word)}' belongs to no flag: write its flag before it")
        else:
            found[-1][1].append(word)
            if shell.unknown(word):
                lost.add(len(found) - 1)
    for position in sorted(lost):
        flag, values = found[position]
        needed = ", ".join(name for value in values for name in shell.unknown(value))
        notes.append(f"{flag} needs {needed}, whose value is not known, so it is left out; write its value")
    return [pair for position, pair in enumerate(found) if position not in lost]


def is_switch(flag: str) -> bool:
    """Whether a flag takes no value."""
    return flag in table().bare or flag in table().paired or flag.startswith("--no-")


_SWITCH_WORDS = ("true", "false", "0", "1", "yes", "no")


def switch_with_value(flag: str, values: Sequence[str], version: str) -> str | None:
    """Why a release refuses a switch that is given a value; None if it takes it, as those before 0.9 took
    `--enable-chunked-prefill true`.
    """
    if not values or not is_switch(flag) or (flag not in table().bare and not matches(version, ">=0.9")):
        return None
    return f"{flag} is a switch and takes no value, but it has {shell.plain(values[0])}"


def model_at_the_end(given: list[tuple[str, list[str]]]) -> str | None:
    """The model of `--max-num-seqs 8 org/model`, if one value too many is the model; it is taken out."""
    for flag, values in given:
        entry = next((k for k in CATALOGUE.values() if flag in k.flags), None)
        most = 0 if is_switch(flag) else 1
        if len(values) > most and (most == 0 or (entry is not None and entry.kind != "ints")):
            if values[most].lower() in _SWITCH_WORDS or values[most].startswith("-"):
                continue
            return values.pop(most)
    return None


def _check_switches(
    given: Mapping[str, list[str]], facts: EngineFacts | None, notes: list[str], source: str
) -> None:
    """BadInput for a switch with a value that the engine refuses; a note where the engine is not known."""
    for flag, values in given.items():
        wrong = switch_with_value(flag, values, facts.version if facts else table().versions[-1])
        if wrong and facts:
            raise BadInput(f"{source}: {wrong}")
        if wrong:
            notes.append(f"{wrong}: vLLM refuses this since 0.9. It is read here as earlier releases read it")


def _given(
    read: Iterable[tuple[str, list[str]]], known: Collection[str], notes: list[str], source: str
) -> dict[str, list[str]]:
    """Flag → values, with full names. Dotted flags (`--x.y 1`) are joined into one object."""
    given: dict[str, list[str]] = {}
    objects: dict[str, dict[str, Any]] = {}
    for flag, values in read:
        values = [shell.plain(value) for value in values]
        head, dot, rest = flag.partition(".")
        exact = _exact(head, known, notes, source)
        if dot:
            _nest(objects.setdefault(exact, {}), rest.split("."), values)
        else:
            if exact in given and given[exact] != values:
                notes.append(f"{exact} occurs twice; the last one counts, as in vLLM")
            given[exact] = values
    return {**given, **{flag: [json.dumps(value)] for flag, value in objects.items()}}


def _nest(into: dict[str, Any], path: Sequence[str], values: Sequence[str]) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    key, text = path[-1], values[0] if len(values) == 1 else ""
    if key.endswith("+"):
        into[key[:-1]] = text.split(",")
    elif re.fullmatch(r"[\d.]+[kmgtKMGT]", text):
        into[key] = catalogue.human_readable_int(text)
    else:
        into[key] = _plain(values)


def _exact(flag: str, known: Collection[str], notes: list[str], source: str) -> str:
    """The flag that vLLM would use: the flag itself, or the only flag that begins with it."""
    if flag in known or flag in ALIASES:
        return ALIASES.get(flag, flag)
    longer = sorted(name for name in known if name.startswith(flag))
    if len(longer) == 1:
        notes.append(
            f"{flag} is short for {longer[0]}. Write the whole name; another release may have two such flags"
        )
        return longer[0]
    raise BadInput(f"{source}: no vLLM has the argument {flag}{nearest(flag, known)}")


def _config(
    given: Mapping[str, list[str]], known: Collection[str], notes: list[str], source: str
) -> dict[str, list[str]]:
    """The arguments of the file of `--config`, if it can be read here. The command line overrides them."""
    if "--config" not in given:
        return {}
    path = Path(given["--config"][0])
    if not path.is_file():
        notes.append(f"--config {path} cannot be read here, so its settings are missing")
        return {}
    found = documents(yamltext.read(path), str(path))
    if not found:
        raise BadInput(f"{path}: expected keys and values")
    return _given(pairs(argv_of_mapping(found[0]), notes), known, notes, source)


def _sorted_out(
    given: Mapping[str, list[str]], notes: list[str], source: str
) -> tuple[dict[str, Value], dict[str, Argument]]:
    """The knobs, and the other arguments."""
    by_flag = {flag: entry for entry in CATALOGUE.values() for flag in entry.flags}
    knobs: dict[str, Value] = _preemption(given, source)
    args: dict[str, Argument] = {}
    for flag, values in given.items():
        positive = "--" + flag.removeprefix("--no-")
        entry = by_flag.get(flag) or by_flag.get(positive)
        notes += _vanished(flag)
        if flag == "--cuda-graph-sizes" and len(values) > 1:  # one number is the largest, several are all
            entry = CATALOGUE["cudagraph_capture_sizes"]
        if OURS.fullmatch(flag):
            if flag not in ("--model", "--config"):
                notes.append(f"{flag} is set by the tuner for every launch")
        elif flag in _PREEMPTION_FLAGS:
            continue
        elif (read := _numbers(flag, entry.kind if entry else "", values, source)) == [None]:
            args |= {"max-model-len": "auto"} if flag == "--max-model-len" else {}
        elif not read and masking.arguments((flag, *values)) != (flag, *values):
            notes.append(f"{flag} is a secret and is not imported")
        elif entry is None:
            args[flag[2:]] = _plain(values)
        else:
            knobs[entry.name] = _knob_value(entry, flag, values, read, source)
    return knobs, args


def _vanished(flag: str) -> list[str]:
    """A note on a flag that the newest vLLM does not have."""
    spans = table().flags.get(flag, ())
    if not spans or spans[-1][1] is None:
        return []
    became = f": {GONE[flag]}" if flag in GONE else "; remove it for a newer engine"
    what = " and is left out" if flag == "--swap-space" else ""
    return [f"{flag} is gone (vLLM {spans[-1][1]} is the last known to have it){what}{became}"]


_PREEMPTION_FLAGS = ("--preemption-mode", "--swap-space", "--kv-offloading-size", "--kv-offloading-backend")


def _preemption(given: Mapping[str, list[str]], source: str) -> dict[str, Value]:
    def size(flag: str, otherwise: str) -> int | float | None:
        return next(iter(_numbers(flag, "float", given.get(flag, [otherwise]), source)), None)

    if "--kv-offloading-size" in given:
        size_gib = size("--kv-offloading-size", "")
        return {} if size_gib is None else {"preemption": f"offload:{size_gib:g}"}
    mode = given.get("--preemption-mode")
    if mode == ["swap"]:
        return {"preemption": f"swap:{size('--swap-space', '4'):g}"}
    return {"preemption": "recompute"} if mode else {}


def _knob_value(
    entry: Knob, flag: str, values: Sequence[str], read: Sequence[int | float | None], source: str
) -> Value:
    if entry.kind == "bool":
        word = (values[0] if values else "true").lower()
        said = word in ("true", "1", "yes")
        return said != flag.startswith("--no-")
    if not values:
        raise BadInput(f"{source}: {flag} has no value")
    value: Value = values[0]
    if entry.kind == "ints":
        value = written(list(read))
    elif entry.kind == "json":
        value = _json(values[0], flag, source)
    elif read:
        value = read[0]
    if (wrong := entry.complaint(value)) is not None:
        raise BadInput(f"{source}: {flag}: {wrong}")
    return value


def _json(text: str, flag: str, source: str) -> Value:
    try:
        return written(json.loads(text))
    except ValueError:
        raise BadInput(f"{source}: {flag}: '{text}' is not JSON") from None


def _numbers(flag: str, kind: str, values: Sequence[str], source: str) -> list[int | float | None]:
    """The numbers of a flag as vLLM's parser reads them; none if it takes none. `kind`: of its knob."""
    if (wanted := catalogue.wanted_number(flag, kind)) is None:
        return []
    found: list[int | float | None] = []
    for text in values if kind == "ints" else values[:1]:
        try:
            found.append(catalogue.read_number(flag, kind, text))
        except ValueError:
            raise BadInput(
                f"{source}: {flag}: vLLM cannot read '{text}' as a number; this flag takes {wanted}"
            ) from None
    return found


def _plain(values: Sequence[str]) -> Argument:
    """The values of an argument that is no knob, as YAML values."""
    if not values:
        return True
    items: list[Value] = []
    for text in values:
        try:
            items.append(written(json.loads(text.lower() if text in ("True", "False") else text)))
        except ValueError:
            items.append(text)
    return items[0] if len(items) == 1 else items
