"""A study: its file as written, and everything that a run of it needs, checked before the first launch."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from tuner import masking, yamltext
from tuner.adapters import adapter_of
from tuner.conclusions import UpgradeFinding
from tuner.errors import BadInput, NotFound, nearest
from tuner.history.store import Store
from tuner.knobs import model as models
from tuner.knobs import space as spaces
from tuner.knobs.arguments import compile_candidate, refusals
from tuner.knobs.model import ModelFacts, tokens_of
from tuner.knobs.space import SearchSpace
from tuner.measures import CLASS, NAMES, class_of, measure_of
from tuner.records import JSON, Candidate, EngineFacts, Node, Slice, Slo, Study, digest_of
from tuner.replay.plan import PLANS, Plan, SliceLimits, check_size, choose_slices, slice_rows
from tuner.search.guides import LADDER_KNOB
from tuner.settings import NAME, Settings, shipped
from tuner.traffic import importers, trace_files
from tuner.traffic import trace as traces
from tuner.traffic.capture.files import find
from tuner.traffic.trace import Trace
from tuner.tuning.survey import EngineFile, Scalar, Surveyed, fixed_arguments, flag_name, named, survey
from tuner.yamltext import Section

# A year.
MOST_HOURS = 8784

MOST_S = MOST_HOURS * 3600.0

# Larger numbers are slips: a trial takes minutes, and no engine serves a thousand times its traffic.
MOST_TRIALS = 100_000
MOST_SPEED = 1000.0

# Ten times worse; a larger limit would allow anything.
MOST_WORSE = 10.0


class SliceFile(Section):
    """One slice chosen by hand, in seconds of trace time."""

    start_s: float = Field(ge=0, le=MOST_S)
    duration_s: float = Field(gt=0, le=MOST_S)
    name: str = Field(default="", max_length=100, pattern=rf"^$|{NAME}")
    held_out: bool = False


class LimitsFile(Section):
    """Limits for each request of a class."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)


class SloFile(LimitsFile):
    """Limits per request; the SLO is met when `attainment` of the requests meet all of them. Requests of a
    class named under `classes` have its limits instead.
    """

    attainment: float = Field(default=0.95, gt=0, le=1)
    classes: dict[Annotated[str, Field(pattern=f"^({CLASS.pattern})$")], LimitsFile] = Field(
        default_factory=dict, max_length=100
    )


class QualityFile(Section):
    """How much of the output may differ from the baseline's, for knobs that change the output."""

    min_token_agreement: float = Field(default=0.99, ge=0, le=1)


class BudgetFile(Section):
    """What one run may spend."""

    trials: int = Field(default=40, ge=1, le=MOST_TRIALS)
    hours: float | None = Field(default=None, gt=0, le=MOST_HOURS)


class WeightsFile(Section):
    """The winner by the smallest weighted sum of its objectives (`winner.pick`)."""

    weights: dict[str, float] = Field(max_length=100)


PlanName = Literal["quick", "brief", "standard", "thorough"]


class PlanFile(Section):
    """A plan by name with some of its numbers changed (see `replay.plan.Plan` for what each is)."""

    base: PlanName = "standard"
    slices: int | None = Field(default=None, ge=1, le=1000)
    slice_s: float | None = Field(default=None, gt=0, le=MOST_S)
    repeats: int | None = Field(default=None, ge=1, le=1000)
    most_repeats: int | None = Field(default=None, ge=1, le=1000)
    finalists: int | None = Field(default=None, ge=1, le=1000)
    warmup_waves: int | None = Field(default=None, ge=0, le=1000)
    warmup_requests: int | None = Field(default=None, ge=1, le=100_000)
    warmup_tokens: int | None = Field(default=None, ge=1, le=100_000)
    warmup_limit_s: float | None = Field(default=None, ge=0, le=MOST_S)
    priming_turnovers: float | None = Field(default=None, ge=0, le=1000)
    priming_limit_s: float | None = Field(default=None, ge=0, le=MOST_S)
    load_warmup_s: float | None = Field(default=None, ge=0, le=MOST_S)
    tail_limit_s: float | None = Field(default=None, gt=0, le=MOST_S)
    lateness_ms: float | None = Field(default=None, gt=0)
    lateness_share: float | None = Field(default=None, gt=0)
    attribution: float | None = Field(default=None, ge=0, le=100)

    def overrides(self) -> dict[str, int | float]:
        """What the file sets, by the plan's own names."""
        return {name: v for name, v in self.model_dump(exclude={"base"}).items() if v is not None}


class StudyFile(Section):
    """The whole study file; tuner/data/study.yaml says what each key means."""

    name: str = Field(min_length=1, max_length=100, pattern=NAME)
    model: str = Field(min_length=1)
    workload: str = Field(default="default", pattern=NAME)
    node: str = "local"
    trace: str
    history: Literal["synthetic", "session", "live"] = "synthetic"
    space: str
    engine: EngineFile
    baseline: dict[str, Scalar] = Field(default_factory=dict)
    slices: Literal["auto"] | Annotated[list[SliceFile], Field(min_length=1)] = "auto"
    speed: float = Field(default=1.0, ge=1 / MOST_SPEED, le=MOST_SPEED)
    plan: PlanName | PlanFile = "standard"
    slo: SloFile = Field(default_factory=SloFile)
    objectives: list[str] = Field(default=["ttft_p95_ms", "tpot_p95_ms", "goodput_rps"], min_length=1)
    winner: Literal["slo", "knee"] | WeightsFile = "slo"
    not_worse: dict[str, float] = Field(default_factory=dict)
    live_limits: Literal["auto", "off"] = "auto"
    sampler: Literal["tuner", "tpe", "gp", "nsga2", "random", "ladder"] = "tuner"
    quality: QualityFile | Literal["off"] = Field(default_factory=QualityFile)
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    budget: BudgetFile = Field(default_factory=BudgetFile)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    @field_validator("live_limits", "quality", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: object) -> object:
        return "off" if value is False else value

    @field_validator("not_worse", mode="before")
    @classmethod
    def _shares(cls, limits: object) -> object:
        """`10%` and 0.1 are the same share of the baseline's value."""
        if not isinstance(limits, dict):
            return limits
        return {name: _share(str(name), value) for name, value in limits.items()}

    @model_validator(mode="after")
    def _what_needs_each_other(self) -> "StudyFile":
        _check_weights(self.winner, self.objectives)
        limits = (self.slo.ttft_ms, self.slo.tpot_ms, self.slo.e2e_ms)
        missing = {"price_per_gpu_hour"} if self.price_per_gpu_hour is None else set()
        missing |= {"slo"} if limits == (None, None, None) else set()
        for name in self.objectives:
            if (need := measure_of(name).needs) in missing:
                said = "a limit under slo" if need == "slo" else need
                raise ValueError(f"the objective {name} needs {said}: it has no value without that")
        if isinstance(self.slices, list):
            _check_named(self.slices)
        return self

    @field_validator("history", mode="before")
    @classmethod
    def _no_text_is_kept(cls, value: object) -> object:
        if value == "raw":
            raise ValueError(
                "raw is not possible, because a trace keeps no text. So the tuner cannot measure what "
                "depends on the text (speculative decoding, structured output). Choose synthetic, "
                "session or live"
            )
        return value

    @field_validator("objectives")
    @classmethod
    def _known_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in NAMES:
                raise ValueError(f"'{name}' is not a measurement{nearest(name, sorted(NAMES))}")
        if len(set(names)) != len(names):
            raise ValueError("an objective is named twice")
        return names


def _share(name: str, value: object) -> float:
    if name not in NAMES:
        raise ValueError(f"'{name}' is not a measurement{nearest(name, sorted(NAMES))}")
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if isinstance(value, bool) or not 0 <= share <= MOST_WORSE:
        raise ValueError(
            f"{name}: say by how much a winner may be worse than today, such as 10% or 0.1, not {value!r}"
        )
    return share


def _check_weights(winner: object, objectives: list[str]) -> None:
    """ValueError unless every weight is of an objective and some weight counts."""
    if not isinstance(winner, WeightsFile):
        return
    for name, weight in winner.weights.items():
        if name not in objectives:
            raise ValueError(
                f"winner.weights: '{name}' is not an objective of this study{nearest(name, objectives)}"
            )
        if weight < 0:
            raise ValueError(f"winner.weights: the weight of {name} must be a number ≥ 0, not {weight:g}")
    if not any(winner.weights.values()):
        raise ValueError("winner.weights: at least one weight must be above 0")


def _check_named(slices: list[SliceFile]) -> None:
    """ValueError when nothing is left to search on, or two slices go by one name."""
    if all(each.held_out for each in slices):
        raise ValueError("slices: every slice is held out; leave at least one to search on")
    names = [each.name for each in slices if each.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"slices: two of them are named '{twice}'")


def no_judgement(file: StudyFile) -> str | None:
    """Why a knob that changes the output may not be turned, or None."""
    loads = (v for key, v in file.engine.args.items() if key.lstrip("-").replace("_", "-") == "load-format")
    weightless = adapter_of(file.engine.kind).simulated or "dummy" in map(str, loads)
    if file.quality == "off" or not weightless:
        return None
    return "it changes the answers, and without weights they cannot be judged (quality: off allows it)"


def read(path: Path) -> StudyFile:
    """Read a study file. BadInput names the file, the line, the key and the nearest right thing."""
    return parse(yamltext.read(path, "the study file"), name=str(path))


def parse(text: str, *, name: str) -> StudyFile:
    """The study in a YAML text; `name` is what errors call it."""
    found = yamltext.load(text, name)
    if not isinstance(found.value, dict):
        raise BadInput(
            f"{name}: a study file is a mapping of keys, such as name, model, trace, space, engine"
        )
    try:
        return StudyFile.model_validate(found.value)
    except ValidationError as error:
        raise BadInput(yamltext.sentence(error, StudyFile, name, found.lines)) from error


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
    """What is measured in turns. The first arm is compared with each of the others. Each arm has at most
    `rounds` launches, and fewer if every difference is known: it is clear, or smaller than `margin` (a
    share) in both directions. With `upgrade`, the second arm is the first one on another version; `upgrade`
    holds what is known of that before a launch.
    """

    arms: tuple[ComparedArm, ...]
    rounds: int
    margin: float
    upgrade: UpgradeFinding | None = None


def load(path: Path, *, store: Store | None, now: datetime) -> Prepared:
    """Read and prepare a study file; writes nothing. BadInput or NotFound says what is wrong."""
    return prepare(read(path), name=str(path), base=path.parent, store=store, now=now)


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
    host = surveyed or named(file.node, survey(file.engine, base=base), store)
    command, facts, node = host.command, host.facts, host.node
    baseline = Candidate(file.baseline)
    _check_baseline(baseline, facts, file, model, name)
    restricted = _turned(space, file, facts, baseline, name)
    always = fixed_arguments(file.engine.args, facts, restricted, name)
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


def _trace(ref: str, base: Path, store: Store | None) -> tuple[Trace, Path]:
    captured = find(ref, (Settings().home / "captures", base))
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
            f"is not a file ({path}), not a known trace, and not latest:NAME"
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


def _max_model_len(file: StudyFile, model: ModelFacts, name: str) -> int:
    """The engine's longest request in tokens. BadInput if the file asks for more than the model has."""
    args = {flag_name(key): value for key, value in file.engine.args.items()}
    lifted = file.engine.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0")
    lifted = lifted or bool(LENGTHENING & set(args))
    asked = {"engine.args.max-model-len": args.get("--max-model-len"),
             "baseline.max_model_len": file.baseline.get("max_model_len")}  # fmt: skip
    for key, value in asked.items():
        if tokens_of(value) > model.longest and not lifted:
            raise BadInput(
                f"{name}: {key}: {value} is too large: the config.json of {file.model} allows at most"
                f" {model.longest} tokens"
            )
    return tokens_of(args.get("--max-model-len")) or model.max_len


def _slices(file: StudyFile, trace: Trace) -> tuple[Slice, ...]:
    if file.slices != "auto":
        return choose_slices(trace, [s.model_dump(exclude_defaults=True) for s in file.slices])
    plan = plan_of(file)
    tail = 1000 if any("_p99_" in name for name in file.objectives) else 200
    limits = SliceLimits(
        slices=plan.slices,
        min_s=plan.slice_s,
        max_s=plan.slice_s if plan.demonstration else 10 * plan.slice_s,
        requests=tail,
        held_out=not plan.demonstration,
        speed=file.speed,
    )
    return choose_slices(trace, "auto", limits=limits)


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
        rows = slice_rows(trace, part)
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
                more = f"the model takes at most {model.longest} tokens: choose other slices"
            raise BadInput(
                f"{name}: slice {part.name} has a request of {longest} tokens, but the engine takes only"
                f" {max_model_len}; {more}"
            )


def _check_classes(file: StudyFile, trace: Trace, name: str) -> None:
    """BadInput if the file asks for a class of requests that the trace does not have."""
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
    if file.sampler == "ladder" and LADDER_KNOB not in found.levels:
        raise BadInput(
            f"{name}: sampler: ladder changes {LADDER_KNOB}, but space '{space.name}' does not have it"
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
