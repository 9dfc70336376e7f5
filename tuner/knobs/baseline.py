"""What runs today, read from its command line, as a study's baseline: knobs, arguments, environment."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput, nearest
from tuner.knobs.catalogue import CATALOGUE, Knob, written
from tuner.knobs.configfile import argv_of_mapping, load_yaml
from tuner.knobs.space import SearchSpace
from tuner.knobs.versions import FlagTable, negation, table
from tuner.records import Candidate, EngineFacts, Value

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-asc": "--api-server-count",
    "-O": "--optimization-level",
}
ALIASES = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
}
OURS = re.compile(r"--(model|host|port|uds|served-model-name|api-key|ssl-.+|root-path|config)")
"""What the tuner sets itself for every launch, or what has no place in a study."""
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
_OPERATORS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<"})
_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)

Argument = Value | list[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A running configuration. `candidate` holds knobs, `args` the other arguments (dash names without `--`);
    `notes` say what was left out or read with a doubt.
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

        Knobs that the space turns are the baseline; all others stay as they are for every candidate, so they
        are fixed arguments. Without a space, what changes the answers and what is never turned is fixed.
        """
        turned = {name: value for name, value in self.candidate.items() if _is_turned(name, space)}
        fixed = {
            CATALOGUE[name].flags[0][2:]: _decoded(CATALOGUE[name], value)
            for name, value in self.candidate.items()
            if name not in turned
        }
        engine = {"args": {**fixed, **self.args}, "env": dict(self.env)}
        study: dict[str, Any] = {"model": self.model} if self.model else {}
        return {**study, "baseline": turned, "engine": {key: value for key, value in engine.items() if value}}


def from_command(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    source: str,
    name: str = "",
    facts: EngineFacts | None = None,
) -> Imported:
    """A configuration from a command line that starts vLLM, whatever stands before it, or bare arguments.

    `facts` gives the exact flags of the engine; without it the flags of every known release count. BadInput
    names an argument that no vLLM has.
    """
    notes: list[str] = []
    before, tail = _tail(_unwrapped(words))
    assigned = {m[1]: m[2] for word in before if (m := _ASSIGNMENT.fullmatch(word)) and "vllm" not in m[1]}
    environment = {**env, **assigned}
    extra = shlex.split(environment.pop("VLLM_ADDITIONAL_ARGS", ""))
    arguments = [_expanded(word, environment, notes) for word in (*tail, *extra)]
    positional = [arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    known = facts.flags if facts else _all_flags(table())
    given = _given(_long(arguments), known, notes, source)
    given = {**_config(given, known, notes, source), **given}
    named = positional or given.get("--model")
    knobs, args = _sorted_out(given, notes, source)
    kept = {key: value for key, value in environment.items() if not SECRET.search(key)}
    notes += [f"{key} is a secret and stays where it is" for key in environment.keys() - kept.keys()]
    return Imported(
        source=source,
        name=name,
        model=named[0] if named else None,
        candidate=Candidate(knobs),
        args=args,
        env=kept,
        notes=tuple(notes),
    )


def _is_turned(name: str, space: SearchSpace | None) -> bool:
    if space is not None:
        return name in space.levels
    entry = CATALOGUE[name]
    return not entry.changes_output and entry.never is None


def _decoded(entry: Knob, value: Value) -> Any:
    return json.loads(str(value)) if entry.kind in ("ints", "json") else value


def _unwrapped(words: Sequence[str]) -> list[str]:
    """The words of a shell's `-c` script, if that is what starts vLLM."""
    for position, word in enumerate(words[:-1]):
        if word in ("-c", "-lc", "-ec") and "vllm" in words[position + 1]:
            return shlex.split(words[position + 1].replace("\\\n", " "), comments=True)
    return list(words)


def _tail(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before vLLM's own arguments, and those."""
    end = next((i for i, word in enumerate(words) if word in _OPERATORS and _starts(words[:i])), len(words))
    words = list(words[:end])
    start = _starts(words)
    if start is None:
        image = next((i for i, word in enumerate(words) if "vllm" in word and not word.startswith("-")), None)
        start = 0 if image is None or words[0].startswith("--") else image + 1
    if start < len(words) and words[start] == "serve":
        start += 1
    return words[:start], words[start:]


def _starts(words: Sequence[str]) -> int | None:
    """Where vLLM's arguments begin after `vllm serve` or its module, or None."""
    for position, word in enumerate(words):
        if word.endswith(("vllm.entrypoints.openai.api_server", "openai/api_server.py")):
            return position + 1
        if word.rsplit("/", maxsplit=1)[-1] == "vllm" and list(words[position + 1 : position + 2]) == [
            "serve"
        ]:
            return position + 2
    return None


def _expanded(word: str, env: Mapping[str, str], notes: list[str]) -> str:
    """A word with `$NAME`, `${NAME}` and `$(NAME)` filled from the environment that came with it."""

    def fill(found: re.Match[str]) -> str:
        name = found[1] or found[2] or found[3]
        if name not in env:
            notes.append(f"'{word}' needs {name}, which is not given here; write its value")
            return found[0]
        return env[name]

    return re.sub(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))", fill, word)


def _long(words: Iterable[str]) -> list[str]:
    """Short flags as long ones; `-O2` as two words."""
    found: list[str] = []
    for word in words:
        level = re.fullmatch(r"-O\.?(\d)", word)
        if level:
            found += ["--optimization-level", level[1]]
        else:
            found.append(SHORT.get(word, word))
    return found


def _all_flags(data: FlagTable) -> frozenset[str]:
    return frozenset(data.flags) | {negation(flag) for flag in data.paired}


def _pairs(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Long flags of an argv with their values, `--flag=value` split. BadInput for a value without a flag."""
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name, dot, key = flag.partition(".")
            found.append((name.replace("_", "-") + dot + key, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise BadInput(f"argument '{word}' stands before any flag")
    return found


def _given(
    words: Sequence[str], known: frozenset[str], notes: list[str], source: str
) -> dict[str, list[str]]:
    """Flag → values, names made exact; dotted flags (`--x.y 1`) gathered into one object."""
    given: dict[str, list[str]] = {}
    objects: dict[str, dict[str, Any]] = {}
    for flag, values in _pairs(words):
        head, dot, rest = flag.partition(".")
        exact = _exact(head, known, notes, source)
        if dot:
            _nest(objects.setdefault(exact, {}), rest.split("."), values)
        else:
            given[exact] = values
    return {**given, **{flag: [json.dumps(value)] for flag, value in objects.items()}}


def _nest(into: dict[str, Any], path: Sequence[str], values: Sequence[str]) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = _plain(values)


def _exact(flag: str, known: frozenset[str], notes: list[str], source: str) -> str:
    """The flag that vLLM would take: itself, or the only one that begins with it."""
    if flag in known or flag in ALIASES:
        return ALIASES.get(flag, flag)
    longer = sorted(name for name in known if name.startswith(flag))
    if len(longer) == 1:
        notes.append(
            f"{flag} is short for {longer[0]}; write it out, since another release may have two such"
        )
        return longer[0]
    raise BadInput(f"{source}: no vLLM has the argument {flag}{nearest(flag, known)}")


def _config(
    given: Mapping[str, list[str]], known: frozenset[str], notes: list[str], source: str
) -> dict[str, list[str]]:
    """The arguments of the file that `--config` names, if it can be read here; the command line wins."""
    if "--config" not in given:
        return {}
    path = Path(given["--config"][0])
    if not path.is_file():
        notes.append(f"--config {path} is not readable here; what it sets is missing")
        return {}
    mapping = load_yaml(yamltext.read(path), str(path))
    return _given(argv_of_mapping(mapping), known, notes, source)


def _sorted_out(
    given: Mapping[str, list[str]], notes: list[str], source: str
) -> tuple[dict[str, Value], dict[str, Argument]]:
    """Knobs, and the arguments that are none."""
    by_flag = {flag: entry for entry in CATALOGUE.values() for flag in entry.flags}
    knobs: dict[str, Value] = _preemption(given)
    args: dict[str, Argument] = {}
    for flag, values in given.items():
        positive = "--" + flag.removeprefix("--no-")
        entry = by_flag.get(flag) or by_flag.get(positive)
        if (
            flag == "--cuda-graph-sizes" and len(values) > 1
        ):  # one number is the largest size, several are all
            entry = CATALOGUE["cudagraph_capture_sizes"]
        if OURS.fullmatch(flag):
            if flag not in ("--model", "--config"):
                notes.append(f"{flag} is set by the tuner for every launch")
        elif flag in _PREEMPTION_FLAGS:
            continue
        elif entry is None:
            args[flag[2:]] = _plain(values)
        else:
            knobs[entry.name] = _knob_value(entry, flag, values, source)
    return knobs, args


_PREEMPTION_FLAGS = ("--preemption-mode", "--swap-space", "--kv-offloading-size", "--kv-offloading-backend")


def _preemption(given: Mapping[str, list[str]]) -> dict[str, Value]:
    if "--kv-offloading-size" in given:
        return {"preemption": f"offload:{given['--kv-offloading-size'][0]}"}
    mode = given.get("--preemption-mode")
    if mode == ["swap"]:
        return {"preemption": f"swap:{given.get('--swap-space', ['4'])[0]}"}
    return {"preemption": "recompute"} if mode else {}


def _knob_value(entry: Knob, flag: str, values: Sequence[str], source: str) -> Value:
    if entry.kind == "bool":
        word = (values[0] if values else "true").lower()
        said = word in ("true", "1", "yes")
        return said != flag.startswith("--no-")
    if not values:
        raise BadInput(f"{source}: {flag} has no value")
    value: Value
    if entry.kind == "ints":
        value = written([int(item) for item in values if item.isdigit()])
    elif entry.kind == "json":
        value = _json(values[0], flag, source)
    elif entry.kind in ("int", "float"):
        value = _number(values[0], flag, source)
        value = float(value) if entry.kind == "float" else value
    else:
        value = values[0]
    if (wrong := entry.complaint(value)) is not None:
        raise BadInput(f"{source}: {flag}: {wrong}")
    return value


def _json(text: str, flag: str, source: str) -> Value:
    try:
        return written(json.loads(text))
    except ValueError:
        raise BadInput(f"{source}: {flag}: '{text}' is no JSON") from None


def _number(text: str, flag: str, source: str) -> int | float:
    """A number with vLLM's suffixes: 8k is 8000, 8K is 8192."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if not found:
        raise BadInput(f"{source}: {flag}: '{text}' is no number")
    value = float(found[1]) * _SUFFIX.get(found[2], 1)
    return int(value) if value.is_integer() else value


def _plain(values: Sequence[str]) -> Argument:
    """The values of an argument that is no knob, as YAML would hold them."""
    if not values:
        return True
    items: list[Value] = []
    for text in values:
        try:
            items.append(written(json.loads(text.lower() if text in ("True", "False") else text)))
        except ValueError:
            items.append(text)
    return items[0] if len(items) == 1 else items
