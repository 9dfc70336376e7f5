"""How numbers, configurations and results are written for people, the same on every surface."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from tuner.conclusions import Attribution, Conclusion, Difference, RunCost, Saving
from tuner.history.entities import RunBest
from tuner.measures import is_maximized, many, measure_of
from tuner.measures import number as number
from tuner.records import (
    JSON,
    Candidate,
    Measurement,
    Node,
    Run,
    RunState,
    Study,
    Trial,
    TrialState,
    Value,
    last_attempts,
    of_attribution,
)


def unit(name: str) -> str:
    """The unit of a measurement name."""
    return "%" if name == "%" else measure_of(name).unit


def heading(name: str) -> str:
    """A measurement's name with its unit and the way that is better: `ttft_p95_ms (ms, ↓ better)`."""
    arrow = "↑" if is_maximized(name) else "↓"
    said = unit(name)
    return f"{name} ({said}, {arrow} better)" if said else f"{name} ({arrow} better)"


def title(name: str) -> str:
    """What a measurement is, in words: `p95 of the time to the first token`. If it has no words, its name."""
    return measure_of(name).words or name


def measured(name: str, value: object) -> str:
    """A value with its unit: `123.4 ms`."""
    return f"{number(value)} {unit(name)}".rstrip()


def knobs(candidate: Mapping[str, object]) -> str:
    """A candidate on one line, as the command line writes it."""
    return " ".join(f"{name}={value}" for name, value in candidate.items()) or "(engine defaults)"


def configuration(trial: Trial, study: Study, trials: Iterable[Trial]) -> Candidate:
    """What a trial's engine was asked for: its knobs and, in a comparison, the arguments that not every arm
    has, such as a flag that another version calls otherwise. `trials` are the study's.
    """
    arms = study.spec.get("arms")
    if not study.compares or not isinstance(arms, list):
        return trial.candidate
    given = [_given(arm.get("fixed")) for arm in arms if isinstance(arm, dict)]
    place = trial.number - min((t.number for t in trials if t.run_id == trial.run_id), default=trial.number)
    own = given[min(place, len(given) - 1)]  # old defaults run on the last arm's engine
    differs = {flag: value for flag, value in own.items() if any(each.get(flag) != value for each in given)}
    return Candidate({**trial.candidate, **differs})


def _given(fixed: JSON) -> dict[str, Value]:
    """The arguments of an engine by flag; of one without a value: True."""
    found: dict[str, list[str]] = {}
    for word in map(str, fixed if isinstance(fixed, list) else ()):
        if word.startswith("--"):
            found[word] = []
        elif found:
            found[next(reversed(found))].append(word)
    return {flag: " ".join(values) or True for flag, values in found.items()}


def saving(found: Saving) -> str:
    """What the winner saves, and after how many nights the tuning is repaid."""
    return (
        f"at {number(found.price_per_gpu_hour)} per GPU-hour the winner saves {number(found.monthly)} a month"
        f" ({found.fraction * 100:.0f} % of the GPU-hours, if the higher {found.metric} lets you use fewer"
        f" GPUs). The tuning cost {number(found.tuning)} and is repaid {_when(found.nights_to_repay)}"
    )


def _when(nights: float) -> str:
    return "within one night" if nights <= 1 else f"after {number(nights)} nights"


def percent(change: float | None) -> str:
    """A change, (after − before) / before, in signed per cent; `?` if it is not known."""
    return "?" if change is None else f"{_signed(change)} %"


def _signed(change: float | None, unbounded: str = "?") -> str:
    """Whole per cent with a sign; what rounds to zero has none."""
    if change is None:
        return unbounded
    whole = round(change * 100)
    return f"{whole:+,}".replace("-", "−") if whole else "0"


def _end(change: float | None, unbounded: str = "?") -> str:
    """The same of the end of an interval; one beside zero keeps a digit, so that its side can be seen."""
    shown = _signed(change, unbounded)
    small = change is not None and shown == "0" and abs(change) >= LEAST
    return f"{change * 100:+.1g}".replace("-", "−") if small and change is not None else shown


LEAST = 1e-5
"""The share from which the end of an interval is told from zero."""


SAME = 0.1
"""The share within which an open difference is called the same."""


def word(found: Difference) -> str:
    """better, worse, or open; of an open one that is known to be small: `the same within 6 %`, a share that
    contains the interval.
    """
    within, low, high = found.within, found.low, found.high
    if found.word != "open" or within is None or within > SAME or low is None or high is None:
        return found.word
    return f"the same within {max(1, math.ceil(100 * max(within, -low, high) - 1e-9))} %"


def change(found: Difference) -> str:
    """A difference from the baseline with its interval: `−48 % (−52 … −43, better)`."""
    if found.before == found.after == 0:
        return f"0 on both sides ({word(found)})"
    low, high = _end(found.low), _end(found.high, unbounded="+∞")
    known = high != "+∞" or (found.low is not None and found.low > -1)
    interval = f"{low} … {high}" if known else "interval not known"
    return f"{percent(found.change)} ({interval}, {word(found)})"


def difference(found: Difference) -> str:
    """The same with the name of what differs: `ttft_p95_ms −48 % (−52 … −43, better)`."""
    return f"{found.metric} {change(found)}"


def step(metric: str, share: float | None) -> str:
    """A change between two nights: `+50 % (worse)`; empty for none."""
    if share is None:
        return ""
    word = "better" if (share > 0) == (is_maximized(metric)) else "worse"
    return percent(share) + (f" ({word})" if round(share * 100) else "")


def outcome(found: Conclusion) -> str:
    """What a run found, in a few words."""
    return found.outcome_words


CONTINUES = "the same command continues it"
STOPPED, INTERRUPTED = "stopped", "interrupted"


def run_state(run: Run, stopped: Collection[str]) -> str:
    """The state of a run in one word. `stopped` are the ids of `Store.stopped_runs`: history says RUNNING."""
    return STOPPED if run.id in stopped else run.state.value


def no_trial(run: Run) -> str:
    """What is said of a run that has no trial. It may have measured earlier trials again."""
    running = run.state is RunState.RUNNING and run.trials_limit != 0
    return "no trial yet" if running else "no new trials"


def unended(run: Run | None, stopped: Collection[str]) -> str:
    """A sentence on a newest run that has no end yet; empty if it has one."""
    if run is None or run.state is not RunState.RUNNING:
        return ""
    return (
        f"The newest run was stopped; {CONTINUES}." if run.id in stopped else "The newest run has not ended."
    )


PASSES = {"search": "search", "confirm": "confirmation", "held_out": "held-out slice"}
ATTRIBUTED = {**PASSES, "search": "attribution", "confirm": "last comparison"}
"""The same of an attribution, whose last comparison holds the reduced configuration against the winner."""
COMPARED = {**PASSES, "search": "first launch", "confirm": "comparison"}
TOGETHER = (
    "A confirmed value comes from all repeats of a run. A rate or a share is computed from the requests of"
    " all repeats together. A count is the mean of the repeats. Any other number is their geometric mean."
)


def again_word(study: Study) -> str:
    """What measures the trials of a study again: `confirmation` or `comparison`."""
    return "comparison" if study.compares else "confirmation"


def pass_name(found: Measurement, study: Study) -> str:
    """What a trial of a study was measured for, and the number of the repeat: `search`, `confirmation 2`."""
    ours = of_attribution(found.folder)
    names = ATTRIBUTED if ours else COMPARED if study.compares else PASSES
    name = names[found.purpose] + (f" {found.repeat}" if found.repeat else "")
    return f"{name} of the last comparison" if ours and found.purpose == "held_out" else name


def trial_state(trial: Trial, stopped: Collection[str] = ()) -> str:
    """The state of a trial in one word. Of a run that was stopped (`Store.stopped_runs`) a trial without an
    end is interrupted: history says RUNNING.
    """
    lost = trial.state is TrialState.RUNNING and trial.run_id in stopped
    return INTERRUPTED if lost else trial.state.value


def trial_counts(trials: Iterable[Trial], stopped: Collection[str] = ()) -> dict[str, int]:
    """How many trials there are, by the state of their last attempt."""
    return dict(sorted(Counter(trial_state(t, stopped) for t in last_attempts(trials)).items()))


def told_counts(trials: Collection[Trial], stopped: Collection[str] = ()) -> str:
    """The same for people: `4 COMPLETE, 1 RUNNING (1 earlier attempt)`; empty for no trial. Trials of an
    attribution, which no limit of trials counts, are named.
    """
    found = trial_counts(trials, stopped)
    earlier = len(trials) - sum(found.values())
    beside = len({t.number for t in trials if of_attribution(t.directory)})
    notes = [f"{beside} of the attribution"] if beside else []
    notes += [many(earlier, "earlier attempt")] if earlier else []
    said = ", ".join(f"{count} {state}" for state, count in found.items())
    return said + (f" ({', '.join(notes)})" if notes else "")


def trial_word(trial: Trial, stopped: Collection[str] = ()) -> str:
    """The same, and whether the trial was only screened in an engine that ran already."""
    return trial_state(trial, stopped) + (", screened" if trial.screened else "")


def node_state(node: Node, holder: str | None) -> str:
    """The state of a node in one word: a free one that somebody holds is leased."""
    return "leased" if holder is not None and node.state == "free" else node.state


def state(found: Conclusion | None, run: Run) -> str:
    """The outcome of any run; a run that ended without a conclusion is not confirmed."""
    if found is not None:
        return outcome(found)
    return "running" if run.state is RunState.RUNNING else "not confirmed"


def outcome_of(best: RunBest, stopped: Collection[str]) -> str:
    """The outcome of a row of the history. `stopped` are the ids of `Store.stopped_runs`."""
    if best.outcome is None and best.ended_at is None:
        return STOPPED if best.run_id in stopped else "running"
    if best.outcome is None:
        return "not confirmed"
    return best.outcome.value + (" (a demonstration)" if best.demonstration else "")


def no_value(count: int, metric: str) -> str:
    """A sentence on the ended runs whose results do not have a metric; empty for none."""
    return f"left out: {many(count, 'ended run')} without {metric} in the result" if count else ""


def headline(found: Conclusion) -> str:
    """The first line about a run: the outcome, then the sentence of the conclusion."""
    begins = found.sentence.lower().removeprefix("a ")
    return (
        found.sentence
        if begins.startswith((found.outcome.value.lower(), "advice: "))
        else f"{outcome(found)}: {found.sentence}"
    )


def published(found: Conclusion, on_front: bool, attribution: Attribution | None = None) -> str:
    """The sentence on a winner beside a front; empty if there is no winner. If the `attribution` left knobs
    out, the profile is its reduced configuration.
    """
    if found.winner is None or found.compared:
        return ""
    reduced = reduced_of(found, attribution)
    won = found.arm(found.winner)
    ended = "is the published winner" if reduced is None else "won"
    first = f"Trial {won.label if won else found.winner} {ended}."
    if not on_front:
        first += " By its first measurement it is not on the front. But the policy of the study compares the"
        first += " confirmed values of the finalists, and chose this trial."
    return first if reduced is None else f"{first} {left_out(reduced)}"


def reduced_of(found: Conclusion, attribution: Attribution | None) -> int | None:
    """The trial that was published in place of the winner: the winner without the knobs that give nothing."""
    ours = attribution is not None and attribution.published and attribution.winner == found.winner
    return attribution.reduced if attribution is not None and ours else None


def left_out(reduced: int) -> str:
    """The sentence on the trial that was published in place of the winner."""
    return f"The published profile is trial {reduced}: it leaves out the knobs that give nothing."


def cost(found: RunCost, attribution: Attribution | None = None, again: str = "confirmation") -> str:
    """The cost of a run: search, confirmation (`again` is its name) and attribution separately, without
    parts that took nothing. It is in GPU-hours if the run used GPUs, otherwise a time.
    """
    knobs_s = attribution.seconds if attribution is not None else 0.0
    spans = ((found.search_s, "search"), (found.confirm_s, again), (knobs_s, "attribution"))
    spent = [pair for pair in spans if pair[0]] or spans[:2]
    return ", ".join(f"{took(span, gpus=found.gpus > 0)} of {name}" for span, name in spent)


def took(span: float, *, gpus: bool) -> str:
    """How long something used its node: in GPU-hours if `span` is in GPU-seconds, otherwise a time."""
    return f"{span / 3600:.3g} GPU-hours" if gpus else seconds(span)


def seconds(value: float | None) -> str:
    """A duration: `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`; an en dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    whole = round(abs(value))
    if whole < 10 and value != whole:
        return f"{value:.2g} s"
    parts = list(_parts(whole))[:2]
    return " ".join(parts) or "0 s"


def time_left(span: float | None) -> str:
    """`, about 15 min left`: in whole minutes from two minutes on; empty if it is not known."""
    if span is None:
        return ""
    rounded = seconds(round(span / 60) * 60 if span >= 120 else round(span))
    short = rounded.removesuffix(" 0 s").removesuffix(" 0 min")
    return f", about {short} left" if span >= 1 else ", nearly done"


def _parts(whole: int) -> Iterator[str]:
    started = False
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, whole = divmod(whole, size)
        if count or started:
            started = True
            yield f"{count} {name}"
