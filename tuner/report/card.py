"""The answer card: what a run found, in the order in which people ask. One card for every surface: pages and
report draw it (`card.html.j2`), the command line and Markdown print its `lines`.

It shows a stored conclusion and computes no gain of its own.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tuner.conclusions import (
    UNMEASURED,
    Arm,
    Attribution,
    Conclusion,
    Difference,
    Judgement,
    PublishedProfile,
)
from tuner.engine.metrics import same_value
from tuner.measures import in_order, many
from tuner.records import ProfileKey, Run, RunState, Value
from tuner.report import explain, words
from tuner.settings import runnable

Confidence = Literal["high", "medium", "low", "none"]
Tone = Literal["better", "none", "doubt", "failed"]
ENOUGH = 3
"""Repeats of each configuration from which a comparison counts as well repeated."""
BAR = 100.0
"""Half the width of a row's bar in its drawing; zero is in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """One objective: the baseline's value, the shown trial's, and the difference that the run found.

    `change` is None if nothing was compared. `held_out` is the difference on traffic that the search never
    saw. If nothing was compared, it is the shown trial's value there. `bar` is (low, middle, high) of the
    interval in −100 … 100 of the drawing; None without an interval.
    """

    metric: str
    before: float | None
    after: float | None
    change: Difference | None
    held_out: Difference | float | None = None
    bar: tuple[float, float, float] | None = None

    @property
    def name(self) -> str:
        return words.title(self.metric)

    @property
    def held_out_text(self) -> str:
        """What held-out traffic said; empty without any."""
        if isinstance(self.held_out, Difference):
            return words.change(self.held_out)
        return "" if self.held_out is None else words.measured(self.metric, self.held_out)

    @property
    def word(self) -> str:
        """better, worse, open, or nothing if nothing was compared."""
        return self.change.word if self.change else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedKnob:
    """One knob that differs from today's configuration, with the values in effect. `gave`: what it alone
    gave; empty if not known. `asked`: what was asked for, if the engine runs with another value.
    """

    name: str
    before: Value
    after: Value
    gave: str = ""
    asked: Value = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCard:
    """The answer of one run, or of one arm of a comparison, which has no `sentence`. `trial` is the trial
    that the rows show, `label` its name, `profile` the profile that was published of it.

    If the rows have no change, `uncompared` says what their values are; otherwise it is empty.
    `first_only`: the values are single measurements, which no repeat confirmed.

    `tone` is one of better (a winner), none (today's configuration stays), doubt and failed. `names` are
    what the two values of a row are of. `changed` are the knobs that differ from today's configuration.
    `changed_title` says "changed" only of a winner, a published profile or an arm of a comparison.
    `left_out` says that the profile leaves out some of them.
    """

    title: str
    tone: Tone
    sentence: str
    at: datetime
    confidence: Confidence
    because: str
    trial: int | None = None
    label: str = ""
    names: tuple[str, str] = ("today", "")
    rows: tuple[CardRow, ...] = ()
    slo: str = ""
    slo_met: bool | None = None
    changed: tuple[ChangedKnob, ...] = ()
    changed_title: str = "changed"
    profile: PublishedProfile | None = None
    pull: str = ""
    cost: str = ""
    saving: str = ""
    left_out: str = ""
    uncompared: str = ""
    first_only: bool = False


def cards(said: Conclusion, *, attribution: Attribution | None = None) -> tuple[AnswerCard, ...]:
    """What a run found: one card, or one for each arm that a comparison held against the first one."""
    if not said.compared or not said.finalists:
        return (card(said, attribution=attribution),)
    return tuple(card(said, trial=arm.trial) for arm in said.finalists)


def card(
    said: Conclusion,
    *,
    trial: int | None = None,
    pull: str = "",
    profile: PublishedProfile | None = None,
    attribution: Attribution | None = None,
) -> AnswerCard:
    """The card of a conclusion.

    `trial`: show this arm instead of the winner. `pull`: the command that pulls its profile; empty: the one
    that exports this very version, as an alias may soon name another one. `profile`: what was published, if
    it is not the run's challenger. `attribution`: what each knob gave. If it published a reduced
    configuration, the card still shows the winner.
    """
    reduced = words.reduced_of(said, attribution)
    trial = said.winner if reduced is not None and trial == reduced else trial
    arm = said.arm(trial) if trial is not None else _shown(said)
    other = trial is not None and trial != said.winner
    confidence, because = confidence_of(said, arm)
    title, tone = _title(said, arm), _tone(said)
    rows = _rows(said, arm) if arm else ()
    if said.compared and arm is not None:
        title, tone = _against(said, arm)
        confidence, because = ("none", arm.dropped) if arm.dropped else (confidence, because)
    elif other:
        beside = "is" if arm is said.baseline else "beside"
        title, tone = f"Trial {arm.label if arm else trial} {beside} today's configuration", "none"
    profile = profile or (None if other else said.profiles.get("challenger"))
    applies = said.compared or profile is not None or (said.winner is not None and not other)
    return AnswerCard(
        title=title,
        tone=tone,
        sentence="" if said.compared else words.headline(said),
        at=said.at,
        confidence=confidence,
        because=because,
        trial=arm.trial if arm else None,
        label=arm.label if arm else "",
        names=(_today(said, "today"), arm.title if arm else ""),
        rows=rows,
        slo=_slo(said, arm) if arm else "",
        slo_met=arm.slo_met if arm else None,
        changed=_changed(said, arm, explain.gave(attribution)) if arm else (),
        changed_title=f"{arm.title} differs in" if arm and not applies else "changed",
        profile=profile,
        pull=(pull or export_command(profile.id)) if profile else "",
        cost=words.cost(said.cost, attribution, "comparison" if said.compared else "confirmation"),
        saving=words.saving(said.saving) if said.saving else "",
        left_out=words.left_out(reduced) if reduced is not None and not other else "",
        uncompared=_uncompared(said, arm) if arm and rows else "",
        first_only=bool(arm and rows and not arm.measured_again),
    )


def _uncompared(said: Conclusion, arm: Arm) -> str:
    """What the values of an arm without a difference are, and why it has none; empty if it has one."""
    if arm.changes:
        return ""
    if arm.measured_again:
        times = f"measured {_times(said)} in this run"
        if arm is said.baseline:
            return f"{times}: it is {_today(said, TODAY)} itself"
        return f"{times}, not compared, because {_obstacle(said, arm)}"
    first = "these are first measurements"
    if arm is said.baseline:
        return f"{first} of {_today(said, TODAY)} itself"
    if said.outcome is Judgement.NOT_CONFIRMED:
        return f"{first}; {_unfinished(said)}"
    if arm.dropped is not None and arm is not said.baseline:
        return f"{first}; {arm.title} failed when it was measured again"
    others = any(each.measured_again for each in (said.baseline, *said.finalists) if each)
    return f"{first}; {f'this run did not measure {arm.title} again' if others else NOT_AGAIN}"


NOT_AGAIN = "this run measured no trial again"
UNFINISHED = "the confirmation did not end"


def _unfinished(said: Conclusion) -> str:
    """How far the confirmation of a run came that confirmed nothing, as a clause. Where it ended in its first
    repeat, only its launches tell that there was one.
    """
    if said.repeats:
        return f"the confirmation ended after {many(said.repeats, 'repeat')}"
    return UNFINISHED if said.cost.confirm_s else NOT_AGAIN


def _times(said: Conclusion) -> str:
    return "once" if said.repeats == 1 else f"{said.repeats} times"


def _obstacle(said: Conclusion, arm: Arm | None) -> str:
    """Why an arm was not compared with the baseline, as a clause."""
    today = _today(said, TODAY)
    if said.baseline is None:
        return f"{today} was never measured"
    if said.baseline.dropped is not None:
        return f"{today} did not serve this traffic"
    if arm is not None and arm.dropped is not None:
        return f"{arm.title} failed when it was measured again"
    return NOT_AGAIN


WITHOUT = "The run ended without a result"


def card_of_run(run: Run) -> AnswerCard | None:
    """The card of a run that ended without a conclusion; None while it goes on."""
    if run.state is RunState.RUNNING:
        return None
    title = {RunState.FAILED: "The run failed", RunState.CANCELLED: "The run was cancelled"}
    return AnswerCard(
        title=title.get(run.state, WITHOUT),
        tone="failed",
        sentence=run.reason or "The run gave no reason.",
        at=run.at,
        confidence="none",
        because="nothing was compared with today's configuration",
    )


def export_command(profile: int) -> str:
    """The command that prints one version as a file that `vllm serve --config` reads."""
    return f"tuner profile export {profile} --format vllm-yaml"


def pull_command(key: ProfileKey, alias: str) -> str:
    """The command that prints, as such a file, whichever version an alias names when it runs."""
    asked = {"model": key.model, "node": key.target, "workload": key.workload, "alias": alias}
    options = [word for name, value in asked.items() for word in (f"--{name}", value)]
    return shlex.join(["tuner", "profile", "resolve", *options, "--format", "vllm-yaml"])


def _shown(said: Conclusion) -> Arm | None:
    """The winner; else the nearest to the SLO; else the first finalist that was compared (the policy's
    choice), or tried."""
    chosen = said.arm(said.winner) or said.arm(said.nearest)
    compared = [arm for arm in said.finalists if arm.changes]
    return chosen or next(iter([*compared, *said.finalists]), None)


TODAY = "today's configuration"
PLAIN = {
    Judgement.CLEAR_WINNER: "Trial {} is better than today's configuration",
    Judgement.TRADE_OFF: "Trial {} is better in some objectives and worse in others",
    Judgement.BASELINE_FAILED: "Trial {} serves this traffic; today's configuration does not",
    Judgement.NOT_TRUSTED: "No result: the machine changed during the run",
    Judgement.NOT_CONFIRMED: f"No result yet: {NOT_AGAIN}",
    Judgement.NOTHING_SERVED: "No candidate served this traffic",
    Judgement.NO_CLEAR_WINNER: "No clear winner over today's configuration",
    Judgement.BASELINE_STAYS: "Today's configuration stays the best choice",
}


def _today(said: Conclusion, otherwise: str) -> str:
    """What the others were held against: a comparison's first arm by its name."""
    return said.baseline.title if said.compared and said.baseline else otherwise


def _against(said: Conclusion, arm: Arm) -> tuple[str, Tone]:
    """(title, tone) of one arm of a comparison."""
    name, base = arm.title, _today(said, "the first arm")
    if arm.dropped is not None:
        return f"{name} did not serve this traffic", "failed"
    if said.outcome is Judgement.BASELINE_FAILED:
        return f"{name} serves this traffic; {base} does not", "better"
    if said.outcome in UNMEASURED or not arm.changes:
        return f"{name} was not compared with {base}", "doubt"
    found = {each.word for each in arm.changes}
    if {"better", "worse"} <= found:
        return f"{name} is better than {base} in some objectives and worse in others", "doubt"
    if found == {"open"}:
        return f"No clear difference between {name} and {base}", "none"
    word: Tone = "better" if "better" in found else "failed"
    return f"{name} is {'better' if word == 'better' else 'worse'} than {base}", word


def _title(said: Conclusion, arm: Arm | None) -> str:
    if said.outcome is Judgement.SLO_MISSED:
        nearer = said.arm(said.winner) if said.nearest == said.winner else None
        return "No configuration meets the SLO" + (f"; trial {nearer.label} is nearer" if nearer else "")
    if said.outcome is Judgement.NOT_CONFIRMED and (said.repeats or said.cost.confirm_s):
        return f"No result yet: {UNFINISHED}"
    if said.outcome in UNMEASURED and said.baseline is None and not said.finalists:
        return WITHOUT
    return PLAIN[said.outcome].format(arm.label if arm else "–")


def _tone(said: Conclusion) -> Tone:
    if said.outcome is Judgement.NOTHING_SERVED:
        return "failed"
    if said.outcome in UNMEASURED or said.demonstration or said.outcome is Judgement.SLO_MISSED:
        return "doubt"
    return "better" if said.winner is not None else "none"


def confidence_of(said: Conclusion, arm: Arm | None = None) -> tuple[Confidence, str]:
    """(one word, its reason): by repeats, held-out traffic, and what kind of plan measured; of `arm`, or of
    the one that a run's card shows.
    """
    arm = arm or _shown(said)
    own = arm is not None and arm is not said.baseline
    if said.outcome in UNMEASURED:
        why = {
            Judgement.NOT_TRUSTED: "the machine was not the same in the search and in the confirmation",
            Judgement.NOT_CONFIRMED: _unfinished(said),
        }
        return "none", why.get(said.outcome, "nothing could be compared")
    if not (arm.changes if own and arm else said.against_baseline):
        return "none", f"nothing was compared: {_obstacle(said, arm)}"
    if said.demonstration:
        return "low", "a demonstration: its slices are too short for a decision"
    beside = _today(said, TODAY) if own else "the finalists"
    times = f"measured {_times(said)} in turns with {beside}"
    if said.repeats > 1 and (few := _too_few(said, arm)):
        return "low", f"{times}; {few}"
    if said.repeats < ENOUGH:
        return (
            "low" if said.repeats < 2 else "medium",
            f"{times}; {ENOUGH} or more repeats would be more certain",
        )
    unseen = arm if own else said.arm(said.winner)
    held = [c for c in unseen.changes if c.where == "held_out"] if unseen else []
    if said.compared:
        return "high", times
    if said.winner is None:
        return "high", times
    if not held:
        return "medium", f"{times}; there is no held-out traffic"
    if not any(c.word == "better" for c in held):
        return "medium", f"{times}; on held-out traffic nothing is clearly better"
    return "high", f"{times}, and {'' if own else 'the winner is '}better on held-out traffic"


def _too_few(said: Conclusion, arm: Arm | None) -> str:
    """How many repeats show a difference of 10 %, where a run without a winner made fewer; else empty."""
    if said.winner is not None or (said.compared and arm and any(c.word != "open" for c in arm.changes)):
        return ""
    needed = [n.repeats_needed or math.inf for n in said.noise if n.share is not None]
    most = max(needed, default=0)
    if most <= said.repeats:
        return ""
    count = f"at least {most}" if math.isfinite(most) else "more than 100"
    return f"this node needs {count} repeats to show a difference of 10 %"


def _rows(said: Conclusion, arm: Arm) -> tuple[CardRow, ...]:
    """One row for each objective, all bars on one scale."""
    made = {c.metric: c for c in arm.changes if c.where == "confirm"}
    widest = max((_reach(c) for c in made.values()), default=1.0)
    before, after = said.pair(arm)
    found = []
    for name in made or in_order({**arm.searched, **arm.confirmed}):
        change = made.get(name)
        found.append(
            CardRow(
                metric=name,
                before=change.before if change and change.before is not None else before.get(name),
                after=change.after if change and change.after is not None else after.get(name),
                change=change,
                held_out=arm.change(name, "held_out") or arm.held_out.get(name),
                bar=_bar(change, widest) if change else None,
            )
        )
    return tuple(found)


def _reach(found: Difference) -> float:
    ends = [abs(v) for v in (found.low, found.change, found.high) if v is not None]
    return min(max(ends, default=1.0), 2.0)


def _bar(found: Difference, widest: float) -> tuple[float, float, float] | None:
    if found.change is None:
        return None

    def at(value: float | None, unbounded: float) -> float:
        return unbounded if value is None else max(-BAR, min(BAR, value / (widest or 1.0) * BAR * 0.95))

    return at(found.low, -BAR), at(found.change, 0.0), at(found.high, BAR)


def _slo(said: Conclusion, arm: Arm) -> str:
    """Whether the shown trial keeps the SLO, beside today's configuration; empty if nobody measured it."""
    if arm.slo_met is None or arm.attainment is None:
        return ""
    base = said.baseline
    name = _today(said, "today")
    today = f", {name} {base.attainment * 100:.3g} %" if base and base.attainment is not None else ""
    asked = f"; {said.attainment * 100:.4g} % are required" if said.attainment is not None else ""
    word, held = "yes" if arm.slo_met else "no", arm.held_out.get("slo_attainment")
    unseen = "" if held is None else f"; on held-out traffic {held * 100:.3g} %"
    return f"{word} ({arm.attainment * 100:.3g} % of requests keep it{today}{asked}{unseen})"


def _changed(said: Conclusion, arm: Arm, gave: Mapping[str, str]) -> tuple[ChangedKnob, ...]:
    base = said.baseline.engine if said.baseline else None
    engine = {"engine": (base, arm.engine)} if base != arm.engine else {}
    asked = {
        name: value
        for name, value in arm.candidate.items()
        if name in arm.changed and not same_value(value, arm.changed[name][1])
    }
    return tuple(
        ChangedKnob(name=name, before=before, after=after, gave=gave.get(name, ""), asked=asked.get(name))
        for name, (before, after) in {**engine, **arm.changed}.items()
    )


def run_lines(
    said: Conclusion, attribution: Attribution | None = None, program: str = "tuner"
) -> Iterator[str]:
    """What a run found as text: its card, or the headline of a comparison and the card of each arm."""
    if said.compared:
        yield words.headline(said)
    for each in cards(said, attribution=attribution):
        yield from lines(each, program)


def lines(found: AnswerCard, program: str = "tuner") -> Iterator[str]:
    """The card as text, the stored sentence first; of an arm of a comparison its title."""
    yield found.sentence or found.title
    for row in found.rows:
        yield f"  {row.name} ({row.metric}): {row_text(row)}"
    if found.uncompared:
        yield f"  {found.uncompared}"
    if found.slo:
        yield f"keeps the SLO: {found.slo}"
    yield f"confidence: {found.confidence} ({found.because})"
    if found.changed:
        yield f"{found.changed_title}: {', '.join(knob_text(each) for each in found.changed)}"
    if found.left_out:
        yield found.left_out
    if found.cost:
        yield f"took {found.cost}"
    if found.saving:
        yield found.saving
    if found.pull:
        yield f"pull the winner: {runnable(found.pull, program)}"


def row_text(row: CardRow) -> str:
    """`812 → 420 ms, −48 % (−52 … −43, better)`; beside it what was found on held-out traffic."""
    told = f"{words.number(row.before)} → {words.measured(row.metric, row.after)}"
    if row.change is not None:
        told += f", {words.change(row.change)}"
    if row.held_out is not None:
        told += f"; on held-out traffic {row.held_out_text}"
    return told


def knob_text(knob: ChangedKnob) -> str:
    """`max_num_seqs 256 → 64`. If they are known, also what was asked for and what the knob gave."""
    before, after = ("not set" if v is None else v for v in (knob.before, knob.after))
    told = [f"asked for {knob.asked}"] if knob.asked is not None else []
    told += [knob.gave] if knob.gave else []
    return f"{knob.name} {before} → {after}" + (f" ({'; '.join(told)})" if told else "")
