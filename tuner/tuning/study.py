"""Study file → everything a run needs, checked before the first launch."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from tuner import masking
from tuner.adapters import adapter_of
from tuner.conclusions import UpgradeFinding
from tuner.engine.gpu import ORDER, Gpus
from tuner.errors import BadInput, NotFound, nearest
from tuner.history.store import Store
from tuner.knobs import model as models
from tuner.knobs import space as spaces
from tuner.knobs.arguments import compile_candidate, fixed, refusals
from tuner.knobs.catalogue import CATALOGUE
from tuner.knobs.discover import GpuKind, discover, facts_of_help, on_device
from tuner.knobs.model import ModelFacts, tokens_of
from tuner.knobs.space import SearchSpace
from tuner.measures import class_of, measure_of
from tuner.records import JSON, Candidate, EngineFacts, Node, Slice, Slo, Study, digest_of
from tuner.replay.plan import PLANS, Plan, check_size
from tuner.search import ladder
from tuner.settings import Settings, shipped
from tuner.simulator.cost import card_of
from tuner.simulator.options import parser as simulated_flags
from tuner.simulator.options import release_of
from tuner.traffic import importers, slices, trace_files
from tuner.traffic import trace as traces
from tuner.traffic.capture import files as captures
from tuner.traffic.trace import Trace
from tuner.tuning import studyfile
from tuner.tuning.studyfile import Argument, EngineFile, StudyFile, no_judgement

# Flags that the tuner sets itself or that would hide the engine from it.
OURS = ("model", "host", "port", "served-model-name", "uds", "api-key", "root-path", "ssl-keyfile")

# Flags with which a model may take longer requests than its config.json says.
LENGTHENING = frozenset({"--hf-overrides", "--rope-scaling", "--rope-theta"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A study ready to run: its record, and everything that it names.

    `fixed` are every candidate's arguments. Without `rules` candidates are launched even if they are known to
    fail. With a `comparison` nothing is searched: its arms are measured.
    """

    study: Study
    file: StudyFile
    node: Node
    trace: Trace
    trace_path: Path
    space: SearchSpace
    facts: EngineFacts
    model: ModelFacts
    model_path: str
    plan: Plan
    baseline: Candidate
    command: tuple[str, ...]
    fixed: tuple[str, ...]
    max_model_len: int
    rules: bool = True
    comparison: "ComparisonPlan | None" = None

    def known_failure(self, candidate: Candidate) -> str | None:
        """Why a candidate cannot run, as far as that is known without a launch."""
        if (asked := candidate.get("max_model_len")) and tokens_of(asked) > self.model.longest:
            return f"max_model_len {asked} is more than the model's {self.model.longest}"
        if not self.rules:
            return None
        return self.space.known_violation(candidate, self.facts, self.max_model_len, self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedArm:
    """One configuration of a comparison: what the user calls it, its knobs, and the engine that runs it
    (`prepared`, with the arm's own interpreter, facts, fixed arguments and environment).
    """

    name: str
    candidate: Candidate
    prepared: Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """What is measured in turns, the first arm against each of the others: at most `rounds` launches of each,
    fewer once every difference is known: clear, or smaller than `margin` (a share) either way. With `upgrade`
    the second arm is the first one on another version: what is known of that before a launch.
    """

    arms: tuple[ComparedArm, ...]
    rounds: int
    margin: float
    upgrade: UpgradeFinding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """A host's answer about an engine on it: how it is started there, its facts, and the host as a node."""

    command: tuple[str, ...]
    facts: EngineFacts
    node: Node


def survey(engine: EngineFile, *, base: Path, name: str = "local") -> Surveyed:
    """Ask this host's interpreter; launches no engine. `base` is where relative paths begin."""
    command, adapter = engine_command(engine, base), adapter_of(engine.kind)
    if adapter.simulated:  # a part of this program: no process is needed
        facts = facts_of_help(adapter, simulated_flags(release_of(engine.env)).format_help())
        card = card_of(engine.card)
        several = f"x{engine.cards}" if engine.cards > 1 else ""
        gpu = GpuKind(name=card.title, memory_gib=card.memory_gib, count=engine.cards)
        is_cpu = card.platform == "cpu"
        facts = on_device(facts, "cpu" if is_cpu else "cuda", None if is_cpu else gpu)
        node = Node(name=name, gpu_class=f"sim-{engine.card}{several}")
    else:
        facts = discover(command, env={ORDER: "PCI_BUS_ID", **engine.env})
        node = local_node(name, facts, engine.env)
    return Surveyed(command=command, facts=facts, node=node)


def load(path: Path, *, store: Store | None, now: datetime) -> Prepared:
    """Read and prepare a study file; writes nothing. BadInput or NotFound says what is wrong."""
    return prepare(studyfile.read(path), name=str(path), base=path.parent, store=store, now=now)


def prepare(
    file: StudyFile,
    *,
    name: str,
    base: Path,
    store: Store | None,
    now: datetime,
    surveyed: Surveyed | None = None,
) -> Prepared:
    """Resolve what a study file names, relative to `base`. Asks the interpreter; launches no engine.

    `surveyed` is the answer of the host that will do the launches; None: this host is asked.
    """
    trace, trace_path = _trace(file.trace, base, store)
    space = _space(file.space, base)
    folders = (path for path in (Path(file.model).expanduser(), base / file.model) if os.path.isdir(path))
    model_path = next((str(path.resolve()) for path in folders), file.model)
    model = models.read(model_path, env={**os.environ, **file.engine.env})
    host = surveyed or named(file, survey(file.engine, base=base), store)
    command, facts, node = host.command, host.facts, host.node
    baseline = Candidate(file.baseline)
    _check_baseline(baseline, facts, file, model, name)
    restricted = _turned(space, file, facts, baseline, name)
    always = _fixed(file.engine.args, facts, restricted, name)
    max_model_len = _max_model_len(file, model, name)
    chosen = _slices(file, trace)
    _check_slices(trace, chosen, max_model_len, model, file, name)
    identity = _identity(file, model_path, facts, node, trace, space, chosen)
    if restricted.inherited:  # before 0.2 candidates did not have these knobs: they are not comparable
        identity = {**identity, "inherited": dict(restricted.inherited)}
    study = Study(
        id=digest_of(identity),
        name=file.name,
        model=str(identity["model"]),
        node=node.name,
        gpu_class=node.gpu_class,
        workload=file.workload,
        engine_version=facts.version,
        trace_digest=trace.digest,
        space_digest=space.digest,
        slices=chosen,
        objectives=tuple(file.objectives),
        slo=Slo.read(file.slo.model_dump()),
        seed=file.seed,
        identity=identity,
        spec=masking.tree(file.model_dump(mode="json")),
        created_at=now,
    )
    return Prepared(
        study=study, file=file, node=node, trace=trace, trace_path=trace_path, space=restricted, facts=facts,
        model=model, model_path=model_path, plan=plan_of(file), baseline=baseline, command=command,
        fixed=always, max_model_len=max_model_len,
    )  # fmt: skip


def engine_command(engine: EngineFile, base: Path) -> tuple[str, ...]:
    """The words before the engine's own arguments. BadInput when the interpreter does not exist."""
    if engine.stop_command and shutil.which(engine.stop_command[0]) is None:
        raise BadInput(f"engine.stop_command: there is no program {engine.stop_command[0]!r}")
    adapter = adapter_of(engine.kind)
    if adapter.simulated:
        return (sys.executable, *adapter.command)
    python = Path(engine.python).expanduser()
    if not engine.command:
        python = python if python.is_absolute() else base / python
        if not python.is_file():
            raise BadInput(
                f"engine.python: there is no interpreter at {python}; name the python that has vllm"
            )
    return (*engine.command, str(python) if not engine.command else engine.python, *adapter.command)


def _trace(ref: str, base: Path, store: Store | None) -> tuple[Trace, Path]:
    captured = captures.find(ref, (Settings().home / "captures", base))
    path = captured or base / Path(ref).expanduser()
    if os.path.isfile(path):  # a name may be too long for a path
        return (traces.read(path) if path.suffix == ".parquet" else importers.read_any(path)), path
    try:
        if store is None:
            raise NotFound("there is no history yet")
        stored = store.trace(ref.removeprefix("latest:"))
    except NotFound:
        known = sorted({t.name for t in store.traces()}) if store else []
        name = ref.removeprefix("latest:")
        missing = (
            f"is neither a file ({path}) nor the digest of a known trace nor latest:NAME"
            if name == ref
            else f"finds no capture and no known trace of the name '{name}'"
        )
        raise BadInput(
            f"trace: '{ref}' {missing}{nearest(name, known)}; `tuner trace import` makes one"
        ) from None
    try:
        return trace_files.find(stored.digest, stored.path)
    except NotFound as error:
        raise BadInput(f"trace: '{ref}': {error}") from None


def _space(ref: str, base: Path) -> SearchSpace:
    """A file beside the study, else a shipped space by its name, with or without folder and suffix."""
    name = Path(ref).name.removesuffix(".yaml")
    folder = shipped("search_spaces")
    for path in (base / ref, folder / f"{name}.yaml"):
        if os.path.isfile(path):
            return spaces.load(str(path))
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    raise BadInput(
        f"space: there is no file {base / ref} and no shipped space '{name}'{nearest(name, known)}"
    )


def flag_name(key: str) -> str:
    """`max_model_len`, `max-model-len` and `--max-model-len` are one flag: the last."""
    return "--" + key.lstrip("-").replace("_", "-")


def _fixed(
    args: Mapping[str, Argument], facts: EngineFacts, space: SearchSpace, name: str
) -> tuple[str, ...]:
    for key in args:
        flag = flag_name(key).removeprefix("--")
        if flag in OURS:
            raise BadInput(f"{name}: engine.args.{key}: the tuner sets --{flag} itself; leave it out")
        if flag.replace("-", "_") in space.levels:
            raise BadInput(
                f"{name}: engine.args.{key}: the space changes this knob; put today's value under baseline:"
            )
        taken = facts.choices.get(flag.replace("-", "_"))
        value = args[key]
        if taken is not None and not isinstance(value, list | dict | bool) and value not in taken:
            listed = ", ".join(str(choice) for choice in taken)
            raise BadInput(f"{name}: engine.args.{key}: the engine does not take {value}; it takes {listed}")
        entry = CATALOGUE.get(flag.replace("-", "_"))
        plain = isinstance(value, str) and re.fullmatch(r"auto|[\d.]+[kmgtKMGT]?", value)
        checked = entry and entry.kind in ("int", "float") and value != -1 and not plain
        if entry and checked and (wrong := entry.complaint(value)):  # type: ignore[arg-type]
            raise BadInput(f"{name}: engine.args.{key}: {wrong.removeprefix(entry.name + ': ')}")
    return fixed(args, facts, where=f"{name}: engine.args")


def _max_model_len(file: StudyFile, model: ModelFacts, name: str) -> int:
    """The engine's longest request in tokens. BadInput where the file asks for more than the model has."""
    args = {flag_name(key): value for key, value in file.engine.args.items()}
    lifted = file.engine.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0")
    lifted = lifted or bool(LENGTHENING & set(args))
    asked = {"engine.args.max-model-len": args.get("--max-model-len"),
             "baseline.max_model_len": file.baseline.get("max_model_len")}  # fmt: skip
    for key, value in asked.items():
        if tokens_of(value) > model.longest and not lifted:
            raise BadInput(
                f"{name}: {key}: {value} is more than the {model.longest} tokens that {file.model} takes"
                " by its config.json; ask for less"
            )
    return tokens_of(args.get("--max-model-len")) or model.max_len


def _slices(file: StudyFile, trace: Trace) -> tuple[Slice, ...]:
    if file.slices != "auto":
        return slices.choose(trace, [s.model_dump(exclude_defaults=True) for s in file.slices])
    plan = plan_of(file)
    tail = 1000 if any("_p99_" in name for name in file.objectives) else 200
    limits = slices.Limits(
        slices=plan.slices,
        min_s=plan.slice_s,
        max_s=plan.slice_s if plan.demonstration else 10 * plan.slice_s,
        requests=tail,
        held_out=not plan.demonstration,
        speed=file.speed,
    )
    return slices.choose(trace, "auto", limits=limits)


def plan_of(file: StudyFile) -> Plan:
    """The plan that a study file names, with what it changes of it; a changed one is named after its base."""
    if isinstance(file.plan, str):
        return PLANS[file.plan]
    return Plan(**{**asdict(PLANS[file.plan.base]), **file.plan.overrides()})


def _check_slices(
    trace: Trace, chosen: tuple[Slice, ...], max_model_len: int, model: ModelFacts, file: StudyFile, name: str
) -> None:
    _check_classes(file, trace, name)
    plan = plan_of(file)
    for part in chosen:
        check_size(trace, part, speed=file.speed, around_s=plan.load_warmup_s + plan.tail_limit_s)
        rows = slices.rows(trace, part)
        if not len(rows):
            raise BadInput(f"{name}: slice {part.name}, from {part.start_s:g} s on, has no request")
        if beams := int((trace.beam[rows] > 0).sum()):
            raise BadInput(
                f"{name}: slice {part.name} has {beams} beam searches. vLLM does not stream them, so their"
                " tokens cannot be timed. `tuner trace reshape TRACE --beam sample -o FILE` turns them into"
                " sampled answers; `--beam drop` leaves them out"
            )
        longest = int((trace.input_len[rows] + trace.output_len[rows]).max())
        if longest > max_model_len:
            more = "raise engine.args.max-model-len or choose other slices"
            if longest > model.longest:
                more = f"the model takes no more than {model.longest}: choose other slices"
            raise BadInput(
                f"{name}: slice {part.name} has a request of {longest} tokens, the engine takes"
                f" {max_model_len}; {more}"
            )


def _check_classes(file: StudyFile, trace: Trace, name: str) -> None:
    """BadInput where the file asks for a class of requests that the trace does not have."""
    asked = {class_of(each): "objectives" for each in file.objectives}
    asked |= {class_of(each): "not_worse" for each in file.not_worse}
    asked |= dict.fromkeys(file.slo.classes, "slo.classes")
    for one, key in asked.items():
        if one and one not in trace.classes:
            known = ", ".join(trace.classes) or "none: all its requests have one priority, adapter and client"
            raise BadInput(
                f"{name}: {key}: the trace has no class '{one}'{nearest(one, trace.classes)}; it has {known}"
            )


def _turned(
    space: SearchSpace, file: StudyFile, facts: EngineFacts, baseline: Candidate, name: str
) -> SearchSpace:
    """What of the space this study can turn."""
    found = space.restricted(facts, env=file.engine.env, baseline=baseline, unjudged=no_judgement(file))
    if file.sampler == "ladder" and ladder.KNOB not in found.levels:
        raise BadInput(
            f"{name}: sampler: ladder changes {ladder.KNOB}, but space '{space.name}' does not have it"
        )
    return found


def _check_baseline(
    baseline: Candidate, facts: EngineFacts, file: StudyFile, model: ModelFacts, name: str
) -> None:
    try:
        compile_candidate(baseline, facts, env=file.engine.env)
    except BadInput as error:
        raise BadInput(f"{name}: baseline: {error}") from error
    sizes = {flag_name(key)[2:].replace("-", "_"): v for key, v in file.engine.args.items() if type(v) is int}
    if refused := refusals({**sizes, **baseline}, facts, None, model):
        raise BadInput(f"{name}: the baseline cannot start: {refused[0]}")


def named(file: StudyFile, host: Surveyed, store: Store | None) -> Surveyed:
    """The registered node that the file names in place of `local`. BadInput where its GPUs are not this
    host's."""
    if file.node == "local":
        return host
    if store is None:
        raise NotFound(f"there is no node '{file.node}'; `tuner node add` registers one")
    node = store.node(file.node)
    missing = [uuid for uuid in node.gpus if uuid not in host.node.gpus]
    if missing and not adapter_of(host.facts.kind).simulated:
        raise BadInput(
            f"node: {node.name} has GPU {missing[0]}, which this host does not have: type this on host"
            f" {node.host}, or register this host under another name ('tuner node add')"
        )
    return replace(host, node=node)


def local_node(name: str, facts: EngineFacts, env: Mapping[str, str]) -> Node:
    """This host as a node, by the GPUs that `env` shows: its class is card-memory x count, or the platform
    without GPUs.
    """
    if not facts.gpu_name:
        return Node(name=name, gpu_class=facts.platform)
    card = re.sub(r"[^a-z0-9]+", "-", facts.gpu_name.lower().removeprefix("nvidia ")).strip("-")
    memory = f"-{facts.gpu_memory_gib:.0f}" if facts.gpu_memory_gib else ""
    return Node(
        name=name,
        gpu_class=f"{card}{memory}x{max(1, facts.gpu_count)}",
        gpus=Gpus.open(env).uuids,
        gpu_memory_gib=facts.gpu_memory_gib,
    )


# Keys of the study file that are part of its identity as they stand.
COMPARED = (
    "model",
    "workload",
    "history",
    "baseline",
    "speed",
    "plan",
    "slo",
    "objectives",
    "live_limits",
    "seed",
)


def _identity(
    file: StudyFile,
    model: str,
    facts: EngineFacts,
    node: Node,
    trace: Trace,
    space: SearchSpace,
    chosen: tuple[Slice, ...],
) -> Mapping[str, JSON]:
    """All that makes trials comparable; the name, the budget and the winner's policy are not in it."""
    whole = file.model_dump(mode="json")
    engine: dict[str, JSON] = {
        "kind": file.engine.kind,
        "version": facts.version,
        "platform": facts.platform,
        "command": list(masking.arguments(file.engine.command)),
        "args": masking.tree({flag_name(k): v for k, v in whole["engine"]["args"].items()}),
        "env": dict(masking.environment(file.engine.env)),
        "card": file.engine.card if adapter_of(file.engine.kind).simulated else None,
    }
    if file.engine.clock != "real":
        engine["clock"] = file.engine.clock
    if file.engine.cards > 1:
        engine["cards"] = file.engine.cards
    identity: dict[str, JSON] = {key: whole[key] for key in COMPARED}
    identity["model"] = model  # a folder's full path, however it is written
    identity["slo"] = {key: value for key, value in whole["slo"].items() if key != "classes" or value}
    if not isinstance(file.plan, str):
        identity["plan"] = {"base": file.plan.base, **file.plan.overrides()}
    if any(measure_of(name).needs == "price_per_gpu_hour" for name in file.objectives):
        identity["price_per_gpu_hour"] = file.price_per_gpu_hour
    identity |= {
        "node": node.name,
        "gpu_class": node.gpu_class,
        "engine": engine,
        "trace": trace.digest,
        "space": space.digest,
        "slices": [[s.name, s.start_s, s.duration_s, s.held_out] for s in chosen],
    }
    return identity


Clock = Callable[[], datetime]
