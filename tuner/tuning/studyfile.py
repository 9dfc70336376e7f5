"""The study file as written: YAML → StudyFile, or one BadInput naming file, line, key and the nearest one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from tuner import yamltext
from tuner.adapters import adapter_of, adapters
from tuner.errors import BadInput, nearest
from tuner.measures import CLASS, NAMES, measure_of
from tuner.settings import NAME

# A year.
MOST_HOURS = 8784

MOST_S = MOST_HOURS * 3600.0

# Larger numbers are slips: a trial takes minutes, and no engine serves a thousand times its traffic.
MOST_TRIALS = 100_000
MOST_SPEED = 1000.0

# Ten times worse; a larger limit would allow anything.
MOST_WORSE = 10.0

# Environment variables that change where the engine listens or whom it answers.
HIDING = ("VLLM_API_KEY", "VLLM_PORT")

Scalar = bool | int | float | str | None

Argument = Scalar | list[Scalar] | dict[str, JsonValue]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class EngineFile(_Strict):
    """Which engine: `args` are fixed arguments (long flag without dashes → value) of every candidate.

    `command` comes before the interpreter, `stop_command` runs first at each stop (docs/engine.md). A
    simulated engine has `cards` of the preset `card`.
    """

    kind: str = "vllm"
    python: str = ""
    command: tuple[str, ...] = ()
    args: dict[str, Argument] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    stop_command: tuple[str, ...] = ()
    card: str = "h100-80"
    cards: int = Field(default=1, ge=1, le=64)
    clock: Literal["real", "virtual"] = "real"

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in adapters():
            raise ValueError(f"Input should be {' or '.join(map(repr, adapters()))}, not '{kind}'")
        return kind

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_are_text(cls, env: object) -> object:
        return (
            {
                k: v if isinstance(v, str) else str(v).lower() if isinstance(v, bool) else str(v)
                for k, v in env.items()
            }
            if isinstance(env, dict)
            else env
        )

    @field_validator("args")
    @classmethod
    def _named_once(cls, args: dict[str, Argument]) -> dict[str, Argument]:
        seen: dict[str, str] = {}
        for key in args:
            flag = key.lstrip("-").replace("_", "-")
            if flag in seen:
                raise ValueError(f"'{seen[flag]}' and '{key}' are one argument: give it once")
            seen[flag] = key
        return args

    @field_validator("env")
    @classmethod
    def _names_of_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    f"'{name}' is not the name of an environment variable, or its value has a NUL"
                )
            if name in HIDING:
                raise ValueError(f"{name} would hide the engine from the tuner; leave it out")
        return env

    @model_validator(mode="after")
    def _what_goes_together(self) -> "EngineFile":
        simulated = adapter_of(self.kind).simulated
        if not simulated and not self.python:
            raise ValueError(
                f"kind: {self.kind} needs python: the interpreter that has {self.kind} installed"
            )
        if not simulated and self.cards != 1:
            raise ValueError("cards is for kind: simulated; a real engine finds its node's GPUs")
        if not simulated and self.clock == "virtual":
            raise ValueError("clock: virtual is for kind: simulated; a real engine runs in real time")
        if simulated and (self.python or self.command or self.stop_command):
            raise ValueError(
                f"kind: {self.kind} takes neither python nor command nor stop_command, only card, cards,"
                " args and env"
            )
        return self


class SliceFile(_Strict):
    """One slice chosen by hand, in seconds of trace time."""

    start_s: float = Field(ge=0, le=MOST_S)
    duration_s: float = Field(gt=0, le=MOST_S)
    name: str = Field(default="", max_length=100, pattern=rf"^$|{NAME}")
    held_out: bool = False


class LimitsFile(_Strict):
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


class QualityFile(_Strict):
    """How much of the output may differ from the baseline's, for knobs that change the output."""

    min_token_agreement: float = Field(default=0.99, ge=0, le=1)


class BudgetFile(_Strict):
    """What one run may spend."""

    trials: int = Field(default=40, ge=1, le=MOST_TRIALS)
    hours: float | None = Field(default=None, gt=0, le=MOST_HOURS)


class WeightsFile(_Strict):
    """The winner by a weighted sum of log ratios to the baseline."""

    weights: dict[str, float] = Field(max_length=100)


PlanName = Literal["quick", "brief", "standard", "thorough"]


class PlanFile(_Strict):
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


class StudyFile(_Strict):
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
                "raw is not possible: a trace keeps no text, so the tuner cannot measure what "
                "depends on the text (speculative decoding, structured output); choose synthetic, "
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
            f"{name}: give the share by which it may be worse than today, such as 10% or 0.1, not {value!r}"
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
    return "it changes the output, and answers without weights cannot be judged (quality: off allows it)"


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
        raise BadInput(_sentence(error, name, found.lines)) from error


def _sentence(error: ValidationError, name: str, lines: Mapping[tuple[object, ...], int]) -> str:
    found = min(error.errors(), key=lambda e: (e["type"] != "extra_forbidden", -len(e["loc"])))
    at = _place(found["loc"], lines)
    line = next((lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in lines), None)
    where = f"{name} line {line}" if line else name
    key = ".".join(str(part) for part in at)
    if found["type"] == "extra_forbidden":
        section = _SECTIONS.get(str(at[0]), StudyFile) if at[:-1] else StudyFile
        return f"{where}: unknown key '{key}'{nearest(str(at[-1]), section.model_fields)}"
    if found["type"] == "missing":
        return f"{where}: key '{'.'.join([*map(str, at), str(found['loc'][-1])])}' is missing"
    message = found["msg"].removeprefix("Value error, ")
    given = found["input"]
    shown = ""
    if isinstance(given, str | int | float) and found["type"] != "value_error":
        shown = f", not {given!r}" if len(repr(given)) < 100 else f", not {repr(given)[:60]}…"
    return f"{where}: {key or 'study'}: {message}{shown}"


def _place(loc: tuple[int | str, ...], lines: Mapping[tuple[object, ...], int]) -> tuple[object, ...]:
    """The keys of the file that lead to an error; pydantic puts names of union branches in between."""
    at: tuple[object, ...] = ()
    for part in loc:
        if (*at, part) in lines:
            at = (*at, part)
    return at


_SECTIONS: Mapping[str, type[BaseModel]] = {
    "engine": EngineFile,
    "slo": SloFile,
    "quality": QualityFile,
    "budget": BudgetFile,
    "winner": WeightsFile,
    "plan": PlanFile,
    "slices": SliceFile,
}
