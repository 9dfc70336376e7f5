"""Simulates the traffic (the busiest requests of a trace, or a steady rate) with a configuration. This
finds the limit that delays requests most, steps without graphs, preemptions, a prefix cache that is off,
and how much a study would probably gain. To find the limit, each limit is removed in turn.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInput
from tuner.knobs.arguments import compile_candidate
from tuner.knobs.catalogue import negation
from tuner.knobs.space import SearchSpace
from tuner.lint.findings import Finding, found
from tuner.lint.memory import EngineFit, size
from tuner.lint.subject import LintSubject
from tuner.measures import many
from tuner.records import Slice, Slo, Value
from tuner.replay.plan import PLANS
from tuner.simulator.clock import Workload
from tuner.simulator.cost import Coefficients
from tuner.simulator.options import Options, StartRefused
from tuner.simulator.predict import Scene, SimulatedSlice, fold, options_of, simulate, violation_of
from tuner.simulator.state import SchedulerLimits
from tuner.traffic.structure import reuse_by_capacity
from tuner.traffic.trace import Trace, build

MOST = 2000
"""Requests that are simulated."""
DEADLINE_S = 600.0
"""A simulated request counts as failed after so many seconds."""
_PLAN = replace(PLANS["standard"], load_warmup_s=0.0, tail_limit_s=0.0, priming_turnovers=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LintTraffic:
    """What is simulated, and in words what it is."""

    trace: Trace
    about: str


def window(arrival_s: NDArray[np.float64], most: int = MOST) -> tuple[int, int]:
    """The first row, and the one after the last, of the `most` successive requests that arrive within the
    shortest time. BadInput if there is no request.
    """
    if not len(arrival_s):
        raise BadInput("--trace: it has no request")
    count = min(most, len(arrival_s))
    start = int(np.argmin(arrival_s[count - 1 :] - arrival_s[: len(arrival_s) - count + 1]))
    return start, start + count


def busiest(trace: Trace, most: int = MOST) -> LintTraffic:
    """The `most` successive requests that arrive within the shortest time. BadInput: an empty trace."""
    return part(trace.take(np.arange(*window(trace.arrival_s, most))), len(trace))


def part(cut: Trace, whole: int) -> LintTraffic:
    """The busiest requests, already cut out of a trace that has `whole`."""
    which = f"the busiest {len(cut):,} of " if len(cut) < whole else "all " * (whole > 1)
    rate = len(cut) / max(cut.duration_s, 1e-9)
    return LintTraffic(
        trace=cut,
        about=f"{which}{many(whole, 'request', ',.0f')} ({cut.duration_s:,.0f} s, {rate:.3g} a second)",
    )


def steady(rate: float, inputs: int, outputs: int, count: int = MOST) -> LintTraffic:
    """Poisson arrivals at `rate` a second for a minute or more, at most `count`, all of one size, always the
    same ones. No prompt repeats another.
    """
    count = int(min(count, max(200, rate * 120)))
    gaps = np.random.default_rng(0).exponential(1 / rate, count)
    columns = {
        "arrival_s": np.cumsum(gaps),
        "input_len": np.full(count, inputs),
        "output_len": np.full(count, outputs),
    }
    about = f"{count:,} requests of {inputs:,} + {outputs:,} tokens, {rate:g} a second on average (Poisson)"
    return LintTraffic(trace=build(columns), about=about)


def p95s(values: Mapping[str, float]) -> str:
    """p95 TTFT, TPOT and E2E in words; infinite ones come from requests that are never answered."""
    if not np.isfinite(values.get("e2e_p95_ms", np.inf)):
        return f"more than one request in 20 gets no answer in {DEADLINE_S:.0f} s"
    return ", ".join(
        f"p95 {n.upper()} {values.get(f'{n}_p95_ms', 0):,.0f} ms" for n in ("ttft", "tpot", "e2e")
    )


def dealt(traffic: Trace, copies: int) -> Trace:
    """What one of several copies gets when requests are dealt in turns."""
    return traffic if copies < 2 else traffic.take(np.arange(0, len(traffic), copies))


def with_traffic(scene: Scene, trace: Trace, slo: Slo) -> Scene:
    """The scene with a trace as its one slice, every request measured to its end."""
    whole = Slice(name="busiest", start_s=0.0, duration_s=trace.duration_s + 1e-3)
    return replace(scene, trace=trace, slices=(whole,), plan=_PLAN, slo=slo, cut=False, deadline_s=DEADLINE_S)


BINDS = 0.05
"""Share by which p95 E2E must fall for a limit to be called binding."""
UNCOVERED = 0.10
"""Share of steps without a graph that is worth a word."""
REPEATS = 0.05
"""Share of input tokens found again from which the prefix cache is missed."""
OVERLOAD, BURST_S = 2.0, 10.0
"""An overloaded engine needs so many times as long as its traffic lasts, and so many seconds more."""
GAINS = 0.05
"""Share by which the best prediction must beat today's."""
BACKLOG = 4.0
"""Where today's engine needs so many times as long as its traffic lasts, the gain has no range: slower and
faster engines are not simulated. If both engines need so long, the range would be narrower than one point.
"""
FEW = 250
"""Requests on which the space is searched; what is found is simulated on all of them."""
TURNED = (
    "max_num_batched_tokens",
    "max_cudagraph_capture_size",
    "max_num_seqs",
    "enable_prefix_caching",
    "async_scheduling",
)
"""Knobs of the space that are turned one after another, the one that moves most first."""
WORST = "e2e_p95_ms"
UNANSWERED = "failed"
"""Requests that get no answer within DEADLINE_S. More than one in 20 make p95 E2E infinite."""
SAYS = {
    WORST: ("p95 E2E", "p95 E2E {:,.0f} ms", "make p95 E2E {} better"),
    UNANSWERED: (
        f"the number of requests without an answer in {DEADLINE_S:.0f} s",
        f"{{:,.0f}} requests without an answer in {DEADLINE_S:.0f} s",
        "leave {} fewer requests without an answer",
    ),
}
"""What limits and candidates are judged by: its name, a value of it, and a gain in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeBasis:
    """How step times are known: coefficients, their relative error, and where they are from."""

    coefficients: Coefficients
    error: float
    about: str


class TrafficSimulation:
    """One engine under one traffic, run as often as is asked. What cannot differ is not run again."""

    def __init__(self, fit: EngineFit, trace: Trace, slo: Slo, basis: StepTimeBasis) -> None:
        self.fit = fit
        self.basis = basis
        self.scene = with_traffic(fit.scene, trace, slo)
        self.work = Workload(self.scene.trace, self.scene.slices, self.scene.plan)
        self._known: dict[object, list[tuple[Slack, list[SimulatedSlice]]]] = {}
        self.run = self.runs(fit.options)[0]
        self.values = fold([self.run], trace)
        self.judged = WORST if np.isfinite(self.values.get(WORST, 0.0)) else UNANSWERED

    def runs(
        self,
        options: Options,
        limits: SchedulerLimits | None = None,
        coefficients: Coefficients | None = None,
    ) -> list[SimulatedSlice]:
        """The traffic under some options; other limits or coefficients if given."""
        chosen, times = limits or options.limits, coefficients or self.basis.coefficients
        steps = options.ranks, options.budget.capture_most, options.budget.kv_scale
        overlapped = options.limits.async_scheduling
        known = self._known.setdefault((times, *steps, overlapped, options.limits.block_size), [])
        for slack, runs in known:
            if slack.alike(chosen) == slack.limits:
                return runs
        cost = options.cost(self.scene.facts, self.scene.card, times)
        runs = simulate(self.scene, self.work, chosen, cost)
        known.append((Slack(chosen, runs[0], self.scene.trace), runs))
        return runs

    def tail(self, limits: SchedulerLimits | None = None, coefficients: Coefficients | None = None) -> float:
        """What the run is judged by, with other limits or coefficients."""
        runs = self.runs(self.fit.options, limits, coefficients)
        return fold(runs, self.scene.trace).get(self.judged, float("nan"))

    def takes_s(self, run: SimulatedSlice) -> float:
        """Seconds until the last answer of a run."""
        part = self.work.parts[0]
        ends = np.array(part.at_s)[part.measured] + run.requests.e2e / 1e3
        return float(np.max(ends, where=np.isfinite(ends), initial=0.0)) - part.start_s

    def behind(self, run: SimulatedSlice, times: float) -> bool:
        """Whether a run takes so many times as long as its traffic lasts, and BURST_S more."""
        return self.takes_s(run) >= times * self.scene.trace.duration_s + BURST_S

    def says(self, value: float) -> str:
        """A value of what the run is judged by, in words."""
        return SAYS[self.judged][1].format(value)


class Slack:
    """Limits that a run never came near: another value that it would not have reached gives the same run."""

    def __init__(self, limits: SchedulerLimits, run: SimulatedSlice, trace: Trace) -> None:
        self.limits = limits
        self.run = run
        self.running = run.course.most_running
        self.trace = trace

    @cached_property
    def tokens(self) -> float:
        """The most tokens of a step."""
        return float(_steps(self.run)[0].max(initial=0.0))

    @cached_property
    def blocks(self) -> int:
        """No more blocks were ever in use at once."""
        return (self.running + 1) * (_longest(self.trace) // self.limits.block_size + 2)

    def alike(self, other: SchedulerLimits) -> SchedulerLimits:
        """The same limits, with those of the run if neither value is reached."""
        mine = self.limits
        same: dict[str, Any] = {}
        if self.running < min(mine.active, other.active):
            same |= {"max_num_seqs": mine.max_num_seqs, "max_num_active_seqs": mine.max_num_active_seqs}
        budgets = mine.max_num_batched_tokens, other.max_num_batched_tokens
        fixed = not mine.long_prefill_token_threshold_adaptive
        if budgets[0] != budgets[1] and fixed and self.tokens < min(budgets):
            same["max_num_batched_tokens"] = mine.max_num_batched_tokens
        remembers = bool(len(self.trace.blocks)) and other.enable_prefix_caching
        memory_differs = mine.num_blocks != other.num_blocks
        if memory_differs and not remembers and self._never_short(mine, other):
            same["num_blocks"] = mine.num_blocks
        return replace(other, **same)

    def _never_short(self, *both: SchedulerLimits) -> bool:
        """Whether all blocks that can be in use at once leave each of them above its watermark."""
        return all(self.blocks <= (1 - each.watermark) * each.num_blocks - 2 for each in both)


def scaled(coefficients: Coefficients, slower: float) -> Coefficients:
    """Coefficients of an engine whose steps all take `slower` times as long."""
    rates = dict.fromkeys(("compute", "memory", "attention"), 1 / slower)
    return coefficients.scaled(rates | dict.fromkeys(("step_s", "seq_s", "layer_s", "sync_s"), slower))


def check(subject: LintSubject, simulation: TrafficSimulation) -> Iterator[Finding]:
    """Everything that one simulated run, and one with each limit lifted, says."""
    yield from _binding(simulation)
    yield from _graphs(simulation)
    yield from _preempted(subject, simulation)
    yield from _prefixes(subject, simulation)


def _binding(simulation: TrafficSimulation) -> Iterator[Finding]:
    """The limit whose lifting shortens p95 E2E most, if it does so by enough; under overload, the one whose
    lifting leaves the fewest requests without an answer.
    """
    limits, before = simulation.fit.options.limits, simulation.values.get(simulation.judged, float("nan"))
    free = simulation.basis.coefficients.scaled(dict.fromkeys(("layer_s", "sync_s"), 1e-6))
    lifted = {
        **dict.fromkeys(("limit-sequences", "limit-step-tokens", "limit-kv-memory"), before),
        **{name: simulation.tail(other) for name, other in _touched(simulation).items()},
        "limit-host": simulation.tail(coefficients=free),
    }
    change = {name: (after - before) / before for name, after in lifted.items()}
    name = min(change, key=lambda each: change[each] if np.isfinite(change[each]) else 0.0)
    if not change[name] <= -BINDS:
        return
    said = ", ".join(f"{each.removeprefix('limit-')} {value:+.0%}" for each, value in change.items())
    evidence = f"{simulation.says(before)} as configured. Its change if one limit is removed: {said}"
    sentence = f"{_limit(name, limits)} is the tightest limit. Without it,"
    sentence += f" {SAYS[simulation.judged][0]} would be {-change[name]:.0%} better"
    yield found(name, sentence, evidence, _more(name, simulation))


def _longest(trace: Trace) -> int:
    """Tokens of the longest request, prompt and answer."""
    return int((trace.input_len.astype("int64") + trace.output_len).max(initial=0))


def _touched(simulation: TrafficSimulation) -> dict[str, SchedulerLimits]:
    """The limits that the simulated run reached, each lifted; what was never reached cannot bind."""
    limits, values = simulation.fit.options.limits, simulation.values
    wide = max(limits.max_num_batched_tokens, 65536)
    found: dict[str, SchedulerLimits] = {}
    if simulation.run.course.most_running >= limits.active:
        found["limit-sequences"] = replace(limits, max_num_seqs=4096, max_num_active_seqs=None)
    if _steps(simulation.run)[0].max() >= limits.max_num_batched_tokens:
        found["limit-step-tokens"] = replace(limits, max_num_batched_tokens=wide)
    usage = simulation.run.course.table()[:, 2]
    full = usage.max(initial=0.0) + _longest(simulation.scene.trace) / simulation.fit.tokens > 0.9
    if values.get("preemptions", 0.0) > 0 or full:
        found["limit-kv-memory"] = replace(limits, num_blocks=8 * limits.num_blocks)
    return found


def _limit(name: str, limits: SchedulerLimits) -> str:
    return {
        "limit-sequences": f"max_num_seqs {limits.active}",
        "limit-step-tokens": f"max_num_batched_tokens {limits.max_num_batched_tokens}",
        "limit-kv-memory": f"the KV cache of {limits.num_blocks * limits.block_size:,} tokens",
        "limit-host": "the host, which prepares and launches steps,",
    }[name]


def _more(name: str, simulation: TrafficSimulation) -> str:
    """A flag that lifts a limit."""
    options = simulation.fit.options
    limits, budget = options.limits, options.budget
    if name == "limit-sequences":
        free = simulation.runs(options, replace(limits, max_num_seqs=4096, max_num_active_seqs=None))[0]
        return f"--max-num-seqs {1 << max(1, at_once(simulation, free) - 1).bit_length()}"
    if name == "limit-step-tokens":
        return f"--max-num-batched-tokens {min(4 * limits.max_num_batched_tokens, 65536)}"
    if name == "limit-kv-memory":
        room = budget.utilization < 0.95 and budget.kv_bytes is None and budget.blocks is None
        return "--gpu-memory-utilization 0.95" if room else "--kv-cache-dtype fp8 (changes answers)"
    if budget.capture_most and not limits.async_scheduling:
        return "--async-scheduling"
    return "remove --enforce-eager" if budget.capture_most == 0 else _wider(simulation)


def at_once(simulation: TrafficSimulation, run: SimulatedSlice) -> int:
    """The most requests in flight at one moment of a run."""
    part = simulation.work.parts[0]
    due = np.array(part.at_s)[part.measured]
    ends = due + np.where(np.isfinite(run.requests.e2e), run.requests.e2e, 6e5) / 1e3
    edges = np.concatenate([due, ends])
    steps = np.concatenate([np.ones(len(due)), -np.ones(len(ends))])
    return int(np.cumsum(steps[np.argsort(edges, kind="stable")]).max())


def _steps(run: SimulatedSlice) -> tuple[np.ndarray, np.ndarray]:
    """(tokens of a step, how many such steps) of a run; a prompt's chunks that give no token are one each."""
    levels = run.course.table()
    yielding, tokens = (np.diff(levels[:, column], prepend=0) for column in (3, 4))
    counts = np.maximum(yielding, 1)
    return tokens / counts, counts


def _wider(simulation: TrafficSimulation) -> str:
    """The capture size that covers all but one in twenty of the steps."""
    tokens, counts = _steps(simulation.run)
    order = np.argsort(tokens)
    share = np.cumsum(counts[order]) / counts.sum()
    wanted = tokens[order][np.searchsorted(share, 0.95)]
    most = simulation.fit.options.limits.max_num_batched_tokens
    wanted = min(most, 1 << int(np.ceil(np.log2(max(wanted, 1)))))
    if wanted <= simulation.fit.options.budget.capture_most:
        return ""
    return f"--max-cudagraph-capture-size {wanted}"


def _graphs(simulation: TrafficSimulation) -> Iterator[Finding]:
    options = simulation.fit.options
    if simulation.scene.card.platform != "cuda":
        return
    tokens, counts = _steps(simulation.run)
    most = options.budget.capture_most
    share = float(counts[tokens > most].sum() / counts.sum())
    if share < UNCOVERED:
        return
    what = (
        f"are larger than {most} tokens, the largest captured graph"
        if most
        else "run without a captured graph"
    )
    evidence = f"{many(counts.sum(), 'simulated step', ',.0f')}, the largest of {tokens.max():,.0f} tokens"
    fix = _wider(simulation) if most else "remove --enforce-eager"
    yield found("graphs-uncovered", f"{share:.0%} of the steps {what}", evidence, fix)


def _preempted(subject: LintSubject, simulation: TrafficSimulation) -> Iterator[Finding]:
    live = subject.live
    if live and live.preemptions:
        share = f" in {many(live.finished, 'request', ',.0f')}" if live.finished else ""
        sentence = f"the server counts {many(live.preemptions, 'preemption', ',.0f')}{share}"
        yield found("preemption-risk", sentence, "the server's own /metrics", _room(simulation))
        return
    count, requests = simulation.values.get("preemptions", 0.0), len(simulation.scene.trace)
    if count > 0:
        sentence = f"predicted: {many(count, 'preemption', ',.0f')} in {many(requests, 'request', ',.0f')}"
        evidence = f"the KV cache of {simulation.fit.tokens:,} tokens is full at times"
        yield found("preemption-risk", sentence, evidence, _room(simulation))


def _room(simulation: TrafficSimulation) -> str:
    """Fewer sequences than KV memory has room for, with their mean length."""
    trace = simulation.scene.trace
    mean = float((trace.input_len.astype("int64") + trace.output_len).mean())
    return f"--max-num-seqs {max(1, int(0.9 * simulation.fit.tokens / max(mean, 1.0)))}"


def _prefixes(subject: LintSubject, simulation: TrafficSimulation) -> Iterator[Finding]:
    trace, options = simulation.scene.trace, simulation.fit.options
    if options.limits.enable_prefix_caching or not len(trace.blocks):
        return
    share = reuse_by_capacity(trace, [simulation.fit.tokens])[simulation.fit.tokens]
    if share < REPEATS:
        return
    on = simulation.tail(replace(options.limits, enable_prefix_caching=True))
    before = simulation.values[simulation.judged]
    sentence = f"the prefix cache is off, and {share:.0%} of the input tokens repeat an earlier prompt"
    evidence = (
        f"predicted {simulation.says(before)}; with the cache, {simulation.says(on)}"
        f" ({(on - before) / before:+.0%})"
    )
    written = negation("--enable-prefix-caching")
    off = "--enable-prefix-caching" not in subject.source.words and subject.imported.candidate.get(
        "enable_prefix_caching"
    )
    fix = "--enable-prefix-caching" if off is None else f"remove {written}"
    yield found("prefix-cache-off", sentence, evidence, fix, flag=written)


def replicas(subject: LintSubject, simulation: TrafficSimulation, trace: Trace) -> Iterator[Finding]:
    """Whether copies on single cards serve the trace better than one engine split over them."""
    split, copies = size(subject, "tensor_parallel_size"), size(subject, "data_parallel_size")
    if split < 2:
        return
    alone = simulation.fit.knobs.with_values(tensor_parallel_size=1)
    try:
        options, memory = options_of(simulation.scene, alone)
    except StartRefused:
        return
    if not violation_of(options, memory, simulation.scene.card)[1]:
        return
    fit = EngineFit(scene=simulation.fit.scene, knobs=alone, options=options, memory=memory)
    other = TrafficSimulation(fit, dealt(trace, split * copies), simulation.scene.slo, simulation.basis)
    before, after = simulation.values[simulation.judged], other.values[simulation.judged]
    after *= split if simulation.judged == UNANSWERED else 1  # each copy has its part of the requests
    if after > before * (1 - 0.1):
        return
    sentence = (
        f"one engine is split over {many(split, 'card')}. With {split} copies of it, each on one card,"
        f" {SAYS[simulation.judged][0]} is predicted to be {(before - after) / before:.0%} better"
    )
    evidence = (
        f"predicted {simulation.says(before)} for one split engine, and {simulation.says(after)} for copies "
        f"that get the requests in turn; neither was measured"
    )
    fix = f"--tensor-parallel-size 1 --data-parallel-size {split * copies}"
    yield found("replicas-serve-more", sentence, evidence, fix, flag="--tensor-parallel-size")


def attainment(simulation: TrafficSimulation, best: "BestPrediction | None") -> Iterator[Finding]:
    """Whether the SLO is predicted to be kept, and what a study would probably gain."""
    yield from _overload(simulation, best)
    slo, share = simulation.scene.slo, simulation.values.get("slo_attainment")
    limited = any((slo.ttft_ms, slo.tpot_ms, slo.e2e_ms))
    if limited and share is not None and share < slo.attainment:
        sentence = (
            f"{share:.1%} of the requests are predicted to keep the SLO; {slo.attainment:.0%} are required"
        )
        beside = (
            "; with the best candidate of the shipped space,"
            f" {best.attainment:.1%} of the requests keep the SLO"
            if best
            else ""
        )
        yield found("slo-missed", sentence, p95s(simulation.values) + beside, best.flags if best else "")
    if best is not None and best.least >= GAINS:
        gain = " to ".join(dict.fromkeys((f"{best.least:.0%}", f"{best.most:.0%}")))
        gains = SAYS[simulation.judged][2].format(gain)
        sentence = f"a study would probably {gains}. Start it with {best.flags}"
        evidence = (
            f"predicted {simulation.says(simulation.values[simulation.judged])} now, and "
            f"{simulation.says(best.tail)} with this fix, the best of "
            f"{many(best.tried, 'candidate')} of the space {best.space}"
        )
        yield found("study-gain", sentence, evidence, best.flags)


def _overload(simulation: TrafficSimulation, best: "BestPrediction | None") -> Iterator[Finding]:
    """Whether the queue grows for as long as the traffic lasts."""
    trace, takes = simulation.scene.trace, simulation.takes_s(simulation.run)
    lasts = trace.duration_s
    late = simulation.judged == UNANSWERED
    if not late and (len(trace) < FEW or not simulation.behind(simulation.run, OVERLOAD)):
        return
    share = 1 - np.isfinite(simulation.run.requests.e2e).mean()
    sentence = f"the engine needs {takes:,.0f} s for requests that arrive within {lasts:,.0f} s"
    if late:
        sentence = f"{share:.0%} of the requests get no answer in {DEADLINE_S:.0f} s: the engine is too slow"
    evidence = (
        f"{many(len(trace), 'request', ',.0f')}, {len(trace) / lasts:.3g} a second; the last answer after"
        f" {takes:,.0f} s"
    )
    yield found("overloaded", sentence, evidence, best.flags if best else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPrediction:
    """The best prediction of the space: what it turns, what it is judged by (`tail`), and its least and
    most gain as a share.
    """

    flags: str
    tail: float
    attainment: float
    least: float
    most: float
    tried: int
    space: str


def best_of(subject: LintSubject, simulation: TrafficSimulation, space: SearchSpace) -> BestPrediction | None:
    """The best predicted configuration, one knob turned after another; None if nothing beats today's."""
    few = busiest(simulation.scene.trace, FEW).trace
    small = TrafficSimulation(simulation.fit, few, simulation.scene.slo, simulation.basis)
    chosen: dict[str, Value] = {}
    best, tried = _rank(small.values, simulation.scene.slo), 0
    for name in TURNED:
        for level in space.levels.get(name, ()):
            if level is None or level == simulation.fit.knobs.get(name):
                continue
            options = _options(small, {**chosen, name: level})
            tried += 1
            if (
                options is not None
                and (rank := _rank(fold(small.runs(options), few), small.scene.slo)) < best
            ):
                best, chosen = rank, {**chosen, name: level}
    if not chosen or (options := _options(simulation, chosen)) is None:
        return None
    values = fold(simulation.runs(options), simulation.scene.trace)
    before = simulation.values[simulation.judged]
    gains = [(before - values[simulation.judged]) / before]
    swamped = simulation.behind(simulation.run, BACKLOG)
    for factor in (1 + simulation.basis.error, 1 / (1 + simulation.basis.error)):
        if min(gains) >= GAINS and not swamped:  # below, no gain is spoken of
            gains.append(_gain(simulation, options, factor))
    return BestPrediction(
        flags=" ".join(compile_candidate(chosen, subject.facts).argv),
        tail=values[simulation.judged],
        attainment=values.get("slo_attainment", 0.0),
        least=min(gains),
        most=max(gains),
        tried=tried,
        space=space.name,
    )


def _options(simulation: TrafficSimulation, knobs: Mapping[str, Value]) -> Options | None:
    """Options of today's configuration with some knobs turned; None if the engine would not start."""
    try:
        options, memory = options_of(simulation.scene, simulation.fit.knobs.with_values(**knobs))
    except StartRefused:
        return None
    return options if violation_of(options, memory, simulation.scene.card)[1] else None


def _gain(simulation: TrafficSimulation, options: Options, slower: float) -> float:
    """Share by which p95 E2E (under overload, the unanswered share) falls on an engine whose steps take
    `slower` times as long.
    """
    changed = scaled(simulation.basis.coefficients, slower)
    before = simulation.tail(coefficients=changed)
    after = fold(simulation.runs(options, None, changed), simulation.scene.trace)[simulation.judged]
    return (before - after) / before if 0 < before < np.inf and np.isfinite(after) else 0.0


def _rank(values: Mapping[str, float], slo: Slo) -> tuple[float, ...]:
    """Lowest is best: the share that keeps the SLO up to what is wanted, then p95 E2E, then what is not
    answered.
    """
    kept = round(min(values.get("slo_attainment", 0.0), slo.attainment), 2)
    return -kept, values.get(WORST, float("inf")), values[UNANSWERED]
