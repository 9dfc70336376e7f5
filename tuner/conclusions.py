"""What a run concluded: computed once, when it ends, from its own interleaved repeats; stored, never changed.

Every surface (front, history, report, pages, API, notifications, profile evidence) reads this record and
computes no gain of its own. docs/tuning.md explains each outcome. Numbers are ready for JSON: a value that
is not finite (a failed request counts as +inf) is None. A change is (after − before) / before.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from tuner.records import JSON, Knobs, Launch, Value, attempt_name, gpus_held, measures_again, repeat_of

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: Any) -> TypeAdapter[Any]:
    """What reads and writes the records of a kind: one for each, since making one takes milliseconds."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


class JsonRecord:
    """A record that is stored as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, JSON]:
        """The whole record as JSON."""
        found: dict[str, JSON] = adapter(type(self)).dump_python(self, mode="json")
        return found

    @classmethod
    def from_json(cls, text: JSON) -> Self:
        """The record that `to_json` gave. ValidationError for anything else."""
        found: Self = adapter(cls).validate_python(text)
        return found


class Judgement(StrEnum):
    """What a run found, in a few words. A `winner` exists only with the first four."""

    CLEAR_WINNER = "clear winner"
    """A finalist is better than the baseline in an objective and worse in none."""
    TRADE_OFF = "trade-off"
    """A finalist is better in an objective and worse in another, within the study's `not_worse`."""
    BASELINE_FAILED = "baseline failed"
    """Today's configuration did not serve the traffic, the winner did: there is nothing to compare with."""
    SLO_MISSED = "no trial meets the SLO"
    """Of all that was measured again nothing meets it; `winner` is the nearest if it beats the baseline."""
    BASELINE_STAYS = "baseline stays"
    """The study's policy picks today's configuration, or `not_worse` or the held-out slice rules out what
    beats it.
    """
    NO_CLEAR_WINNER = "no clear winner"
    """The differences are within the noise of the measurements."""
    NOT_TRUSTED = "not to be trusted"
    """The machine changed between the search and the confirmation: `drift` names how."""
    NOT_CONFIRMED = "not confirmed"
    """The finalists were not measured again, or not to the end."""
    NOTHING_SERVED = "nothing served"
    """No candidate served the traffic, or every finalist failed when it was measured again."""


UNMEASURED = (Judgement.NOT_CONFIRMED, Judgement.NOTHING_SERVED, Judgement.NOT_TRUSTED)
"""Outcomes without a valid number from a confirmation."""

Where = Literal["confirm", "held_out"]
Word = Literal["better", "worse", "open"]
Advice = Literal["stay", "move", "move with these pins", "re-tune", "measure longer"]
Values = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One finalist against the baseline in one objective, by this run's interleaved repeats.

    `before` is the baseline's value, `after` the finalist's, each over `repeats` launches (None: an earlier
    release did not store it). `change` is between `low` and `high` (None: no upper bound). `word` is about
    the finalist; `open`: the interval contains both better and worse. `within` is the share that the change
    does not exceed either way (None: not known); a narrower claim than the interval's, so it is known sooner.
    """

    metric: str
    where: Where = "confirm"
    before: float | None
    after: float | None
    change: float | None
    low: float | None
    high: float | None
    word: Word
    repeats: int
    within: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One configuration that was measured in turns with others: the baseline, or a finalist.

    `name` is what the user of a comparison calls it (None: the trial's number names it). `engine` is the
    version that ran it in a comparison. `changed` holds the knobs that differ from today's configuration,
    name → (before, after). `dropped` is why it was dropped, if it was. `searched` has the objectives of the
    first measurement in the search. `confirmed` has those of this run's repeats, and `attainment` is the
    share of good requests in these repeats. `held_out` has the same numbers and `slo_attainment` on the
    held-out slice, from the same repeats. `misses_slo_by`: how much of that share is missing, 0 if the SLO
    is met; None if it was not measured again.
    """

    trial: int
    attempt: int = 0
    candidate: Knobs
    name: str | None = None
    engine: str | None = None
    changed: Mapping[str, tuple[Value, Value]] = field(default_factory=dict)
    dropped: str | None = None
    attainment: float | None = None
    misses_slo_by: float | None = None
    searched: Values = field(default_factory=dict)
    confirmed: Values = field(default_factory=dict)
    held_out: Values = field(default_factory=dict)
    changes: tuple[Difference, ...] = ()

    @property
    def label(self) -> str:
        """What its trial is called."""
        return attempt_name(self.trial, self.attempt)

    @property
    def title(self) -> str:
        """What sentences call it."""
        return f"trial {self.label}" if self.name is None else self.name

    @property
    def slo_met(self) -> bool | None:
        """Whether this run's repeats meet the SLO; None if there are none."""
        return None if self.misses_slo_by is None else self.misses_slo_by <= 0

    @property
    def measured_again(self) -> bool:
        """Whether this run's repeats measured it."""
        return bool(self.confirmed or self.changes) or self.misses_slo_by is not None

    def change(self, metric: str, where: Where = "confirm") -> Difference | None:
        """Its difference from the baseline in an objective."""
        return next((c for c in self.changes if (c.metric, c.where) == (metric, where)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much one objective differs between launches of one configuration on this node.

    `share` is the relative standard deviation (None: not known), by `launches` of this run and `earlier` ones
    of the same node, engine and traffic. `repeats_needed` shows a difference of 10 % (None: not known).
    """

    metric: str
    share: float | None
    launches: int = 0
    earlier: int = 0
    repeats_needed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Seconds that a run's own launches of the search and of confirmations occupied the node: GPU-seconds
    if `gpus` > 0, else seconds of wall time. Launches of an earlier run, whose confirmation this run
    finished, are in the cost of that run.
    """

    search_s: float = 0.0
    confirm_s: float = 0.0
    gpus: int = 0

    @classmethod
    def of(cls, made: Sequence[Launch], *, gpus: int) -> Self:
        """The cost of a run by the launches that it made; `gpus` as above."""
        return cls(
            search_s=node_seconds([m for m in made if not measures_again(m.directory)], gpus=gpus > 0),
            confirm_s=node_seconds([m for m in made if repeat_of(m.directory) is not None], gpus=gpus > 0),
            gpus=gpus,
        )


def node_seconds(launches: Iterable[Launch], *, gpus: bool) -> float:
    """How long launches used their node, from their start until the engine had stopped: in GPU-seconds if it
    has `gpus`. It is not rounded: `report.words.took` does that.
    """
    spans = ((each.whole_s or 0.0) * (gpus_held(each.argv) if gpus else 1) for each in launches)
    return math.fsum(max(0.0, span) for span in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What the winner saves compared with the baseline, in the currency of the study's price.

    The winner serves more `metric` per GPU. So for the same traffic, `fraction` of the GPU-hours is no
    longer needed. `monthly` is the price of this fraction on the run's GPUs. `tuning` is the price of the
    run's own GPU-hours. After `nights_to_repay` days the saving has paid for them.
    """

    metric: str
    price_per_gpu_hour: float
    fraction: float
    monthly: float
    tuning: float
    nights_to_repay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedProfile:
    """A profile version that the run published under an alias; its key is the study's."""

    id: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion(JsonRecord):
    """What a run found. `sentence` is the text that every surface prints unchanged.

    `baseline` is today's configuration, with `dropped` if it did not serve (None: never tried). `winner`,
    `nearest` and the arms' `trial` are trial numbers of the study. `attainment` is the share of good requests
    that the SLO requires; `nearest` is the trial that comes nearest to it if none reaches it. `repeats` is
    how often each arm was measured again. `drift` has one sentence per objective in which the baseline
    changed between the search and the confirmation. The finalist that the policy chooses is the first of
    `finalists`. `saving` is given for runs on GPUs with a price.
    `profiles` maps alias to what was published under it.
    """

    run_id: str
    study_id: str
    at: datetime
    outcome: Judgement
    sentence: str
    winner: int | None = None
    baseline: Arm | None = None
    finalists: tuple[Arm, ...] = ()
    attainment: float | None = None
    nearest: int | None = None
    noise: tuple[Noise, ...] = ()
    drift: tuple[str, ...] = ()
    cost: RunCost = field(default_factory=RunCost)
    saving: Saving | None = None
    repeats: int = 0
    profiles: Mapping[str, PublishedProfile] = field(default_factory=dict)
    demonstration: bool = False
    advice: Advice | None = None

    @property
    def verdict(self) -> str:
        """What it found, in a few words: its outcome. For an upgrade check its advice, because the outcome is
        what the study's policy says of the arms, and knows nothing of versions and pins.
        """
        return f"advice: {self.advice}" if self.advice else self.outcome.value

    @property
    def outcome_words(self) -> str:
        """The verdict, which never leaves out that it was a demonstration."""
        return self.verdict + (" (a demonstration)" if self.demonstration else "")

    @property
    def confirmed(self) -> bool:
        """Whether the winner's gain over the baseline was proved, by a plan that is meant to be acted on."""
        beside = self.baseline is not None and self.baseline.dropped is None
        return self.winner is not None and beside and not self.demonstration

    @property
    def measured_again(self) -> bool:
        """Whether finalists were measured again, to the end, on a machine that stayed as it was."""
        return self.outcome not in UNMEASURED and any(arm.changes or arm.confirmed for arm in self.finalists)

    @property
    def compared(self) -> bool:
        """Whether `tuner compare` or `tuner upgrade-check` made it: its arms have names."""
        return any(arm is not None and arm.name is not None for arm in (self.baseline, *self.finalists))

    @property
    def against_baseline(self) -> bool:
        """Whether any finalist was compared with the baseline, by repeats of both."""
        return any(arm.changes for arm in self.finalists)

    def arm(self, number: int | None) -> Arm | None:
        """The baseline or the finalist of a trial number; None if it was not measured again."""
        arms = (*([self.baseline] if self.baseline else []), *self.finalists)
        return next((arm for arm in arms if arm.trial == number), None)

    def pair(self, arm: Arm) -> tuple[Values, Values]:
        """(the baseline's values, the arm's): both by this run's repeats if these measured the arm, else
        both by first measurements (math.inf: not finite). A pair never mixes the two.
        """

        def values(each: Arm | None) -> Values:
            if each is None or arm.measured_again:
                return each.confirmed if each else {}
            return {name: math.inf if v is None else v for name, v in each.searched.items()}

        return values(self.baseline), values(arm)

    def to_json(self) -> dict[str, JSON]:
        """The whole record as JSON, with `confirmed` beside it for readers."""
        return {**JsonRecord.to_json(self), "confirmed": self.confirmed}


How = Literal["measured", "predicted", "not asked"]
"""How the gain of a knob is known: by launches without it, by the calibrated simulator, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobGain:
    """What one knob of a winner gives: `gains` compare the winner (after) with the winner without the knob
    (before), whose value was `before`. `kept`: whether the published profile has it. `mechanism` is the
    simulator's account of what the knob changes; empty if it sees nothing.
    """

    name: str
    before: Value
    value: Value
    how: How
    kept: bool
    gains: tuple[Difference, ...] = ()
    mechanism: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(JsonRecord):
    """Which knobs of a run's winner pay, found after its confirmation. `reduced` is the trial number of the
    configuration without the other knobs (None: nothing was left out). `published` says whether this
    configuration is the profile. `last` holds its differences from the winner in a last comparison.
    `seconds` is how long the attribution used the node, in GPU-seconds on GPUs. `search_s` is the same for
    the run's search. `earlier_search_s` is that of the earlier run which found the winner and had no
    attribution.
    """

    run_id: str
    study_id: str
    at: datetime
    winner: int
    reduced: int | None = None
    published: bool = False
    knobs: tuple[KnobGain, ...] = ()
    last: tuple[Difference, ...] = ()
    sentence: str = ""
    seconds: float = 0.0
    search_s: float = 0.0
    earlier_search_s: float = 0.0


Fault = Literal["code", "default", "both", "none", "start", "open"]
"""Why a new version is slower: its code, a default that changed, some of both; it is not; it does not start
or serve; or that is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostKnob:
    """A setting that the new version does not take under its name. `successor` is the flag that does the
    same there, as far as names tell (None: the setting was left out).
    """

    name: str
    value: Value
    successor: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedDefault:
    """A setting that the configuration leaves to the engine, and that the versions choose differently. An
    engine that does not say is None. `guilty`: whether it explains what is worse (None: not measured).
    """

    name: str
    before: Value
    after: Value
    guilty: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeFinding(JsonRecord):
    """What an upgrade check found beside its conclusion: `compiles` is whether the new version takes the
    configuration as it is, `worse` the measurements that are clearly worse there.
    """

    old: str
    new: str
    configuration: str
    compiles: bool
    lost: tuple[LostKnob, ...] = ()
    moved: tuple[MovedDefault, ...] = ()
    worse: tuple[str, ...] = ()
    fault: Fault = "open"
    advice: Advice = "measure longer"
    sentence: str = ""


HOURS_PER_MONTH = 730.0
"""365 days × 24 hours / 12."""
RATES = ("max_speed", "goodput_rps")
"""What traffic per GPU is measured by: the highest speed that meets the SLO, if it was measured."""


def saving(winner: Arm | None, price_per_gpu_hour: object, cost: RunCost) -> Saving | None:
    """What serving the same traffic with the winner saves on the run's GPUs; None if no GPU or no price is
    known, or if the winner's rate is not clearly better.
    """
    price = price_per_gpu_hour if isinstance(price_per_gpu_hour, int | float) else 0.0
    made = next((c for name in RATES if winner is not None and (c := winner.change(name))), None)
    if (
        not cost.gpus
        or price <= 0
        or made is None
        or made.word != "better"
        or not (made.before and made.after)
    ):
        return None
    fraction = 1 - made.before / made.after
    hourly, hours = fraction * price * cost.gpus, (cost.search_s + cost.confirm_s) / 3600
    return Saving(
        metric=made.metric, price_per_gpu_hour=price, fraction=fraction, monthly=hourly * HOURS_PER_MONTH,
        tuning=hours * price, nights_to_repay=hours * price / (hourly * 24),
    )  # fmt: skip
