"""How numbers, configurations and results are written for people, the same on every surface."""

import math
from collections.abc import Collection, Iterator, Mapping

from tuner.conclusions import Conclusion, Difference, RunCost, Saving
from tuner.history.entities import RunBest
from tuner.measures import is_maximized, measure_of
from tuner.records import Node, Run, RunState, Trial, TrialState


def unit(name: str) -> str:
    """The unit of a measurement name."""
    return "%" if name == "%" else measure_of(name).unit


def heading(name: str) -> str:
    """A measurement's name with its unit and the way that is better: `ttft_p95_ms (ms, ↓ better)`."""
    arrow = "↑" if is_maximized(name) else "↓"
    said = unit(name)
    return f"{name} ({said}, {arrow} better)" if said else f"{name} ({arrow} better)"


def title(name: str) -> str:
    """What a measurement is, in words: `p95 of the time to the first token`; its name where it has none."""
    return measure_of(name).words or name


def number(value: object) -> str:
    """A measured value for reading: four significant digits, ∞ for a failed one, an en dash for none."""
    if not isinstance(value, int | float):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def measured(name: str, value: object) -> str:
    """A value with its unit: `123.4 ms`."""
    return f"{number(value)} {unit(name)}".rstrip()


def knobs(candidate: Mapping[str, object]) -> str:
    """A candidate on one line, as the command line writes it."""
    return " ".join(f"{name}={value}" for name, value in candidate.items()) or "(engine defaults)"


def saving(found: Saving) -> str:
    """What the winner saves, and after how many nights the tuning is repaid."""
    return (
        f"at {number(found.price_per_gpu_hour)} per GPU-hour the winner saves {number(found.monthly)} a month"
        f" ({found.fraction * 100:.0f} % of the GPU-hours, if you use the higher {found.metric} to need"
        f" fewer GPUs); the tuning cost {number(found.tuning)} and is repaid {_when(found.nights_to_repay)}"
    )


def _when(nights: float) -> str:
    return "within one night" if nights <= 1 else f"after {number(nights)} nights"


def percent(change: float | None) -> str:
    """A change, (after − before) / before, in signed per cent; `?` where it is not known."""
    return "?" if change is None else f"{_signed(change)} %"


def _signed(change: float | None, unbounded: str = "?") -> str:
    """Whole per cent with a sign; what rounds to zero has none."""
    if change is None:
        return unbounded
    whole = round(change * 100)
    return f"{whole:+,}".replace("-", "−") if whole else "0"


WORDS = {"better": "better", "worse": "worse", "open": "no measurable difference"}
"""The words for a difference, by the word of the conclusion."""


def change(found: Difference) -> str:
    """A difference from the baseline with its interval: `−48 % (−52 … −43, better)`."""
    low, high = _signed(found.low), _signed(found.high, unbounded="+∞")
    known = high != "+∞" or (found.low is not None and found.low > -1)
    interval = f"{low} … {high}" if known else "interval not known"
    return f"{percent(found.change)} ({interval}, {WORDS[found.word]})"


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
STOPPED = "stopped"


def run_state(run: Run, stopped: Collection[str]) -> str:
    """The state of a run in one word. `stopped` are the ids of `Store.stopped_runs`: history says RUNNING."""
    return STOPPED if run.id in stopped else run.state.value


def no_trial(run: Run) -> str:
    """What is said of a run that has no trial."""
    if run.trials_limit == 0:
        return "no new trials"
    return "no trial yet" if run.state is RunState.RUNNING else "no trial"


def unended(run: Run | None, stopped: Collection[str]) -> str:
    """A sentence on a newest run that has no end yet; empty where it has one."""
    if run is None or run.state is not RunState.RUNNING:
        return ""
    return f"The newest run was stopped; {CONTINUES}." if run.id in stopped else "The newest run goes on."


def trial_state(trial: Trial, stopped: Collection[str] = ()) -> str:
    """The state of a trial in one word. Of a run that was stopped (`Store.stopped_runs`) a trial without an
    end is interrupted: history says RUNNING.
    """
    lost = trial.state is TrialState.RUNNING and trial.run_id in stopped
    return "interrupted" if lost else trial.state.value


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


def headline(found: Conclusion) -> str:
    """The first line about a run: the outcome, then the sentence of the conclusion."""
    begins = found.sentence.lower().removeprefix("a ")
    return (
        found.sentence
        if begins.startswith(found.outcome.value.lower())
        else f"{outcome(found)}: {found.sentence}"
    )


def published(found: Conclusion, on_front: bool) -> str:
    """The sentence on a winner beside a front; empty where there is no winner."""
    if found.winner is None or found.compared:
        return ""
    said = f"Trial {found.winner} is the published winner"
    if on_front:
        return f"{said}."
    return (
        f"{said}: by its first measurement it is not on the front, but within the noise of it; the"
        " confirmation decided."
    )


def cost(found: RunCost) -> str:
    """The cost of a run, of search and confirmation separately (a part that took nothing is left out):
    GPU-hours where it ran on GPUs, else the time."""
    spans = ((found.search_s, "search"), (found.confirm_s, "confirmation"))
    spent = [pair for pair in spans if pair[0]] or spans
    return ", ".join(
        f"{f'{span / 3600:.3g} {found.unit}' if found.gpus else seconds(span)} of {name}"
        for span, name in spent
    )


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
    """`, about 15 min left`: in whole minutes from two minutes on; empty where it is not known."""
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
