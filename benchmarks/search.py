"""The search against its rivals, in virtual time, each charged the GPU-seconds that its trials would take.

    python benchmarks/search.py --traces DIR [--seeds 10] [--quick] [--output docs/results/search]

DIR holds AzureLLMInferenceTrace_conv.csv, AzureLLMInferenceTrace_code.csv, mooncake_conversation_trace.jsonl.
Charged as measured on an H100: a launch 57 s, a new compile group 18 s more, a live change 1 s, a refused
argument 12 s, a replay its own seconds. docs/search.md explains the numbers.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import optuna
from search_truth import (
    CARD_NAMES,
    LEAD_S,
    OBJECTIVES,
    TRACES,
    WINDOW_S,
    Failure,
    Result,
    World,
    finite,
    known,
    load,
)  # fmt: skip

from tuner.records import JSON, Candidate, Measurement, Trial, TrialState, Value, Violation
from tuner.search import judge, pareto, proposals, starts, told
from tuner.search.encoding import encode
from tuner.search.feasibility import Regions
from tuner.search.suggest import suggest

LAUNCH_S, COMPILE_S, CHANGE_S, REFUSED_S = 57.0, 18.0, 1.0, 12.0
NOISE, SCREEN_BIAS = 0.03, 0.06
LIVE = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHARES = (0.8, 0.9, 0.95)
Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What of the search is switched on."""

    simulator: bool = True
    live: bool = True
    early: bool = True
    constraints: bool = True
    cost_aware: bool = True
    back_off: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Bench:
    """One study in virtual time: what it spent, what it knows, and what an onlooker knows to be true."""

    world: World
    seed: int
    budget: float
    spent: float = 0.0
    failed: int = 0
    trials: list[Trial] = field(default_factory=list)
    columns: dict[int, judge.Columns] = field(default_factory=dict)
    engine: Candidate | None = None
    groups: set[Value] = field(default_factory=set)
    log: list[tuple[float, int]] = field(default_factory=list)
    scored: int = 0
    goals: dict[str, float | None] = field(default_factory=dict)
    rows: dict[str, list[list[float]]] = field(default_factory=dict)

    def ran(self, candidate: Candidate) -> Candidate:
        return Candidate({**self.world.defaults, **candidate})

    def launch_s(self, ran: Mapping[str, Value]) -> float:
        return LAUNCH_S + (0.0 if ran["max_num_batched_tokens"] in self.groups else COMPILE_S)

    def launch(self, ran: Candidate) -> Failure | None:
        """Start an engine; how it failed, or None."""
        self.engine = None
        truth = self.world.truth(ran)
        if isinstance(truth, Failure):
            self.spent += REFUSED_S if known(ran) else LAUNCH_S
            self.failed += 1
            return truth
        self.spent += self.launch_s(ran)
        self.groups.add(ran["max_num_batched_tokens"])
        self.engine = ran
        return None

    def changeable(self, ran: Mapping[str, Value]) -> bool:
        """Whether the running engine can be turned into this one by its limits alone."""
        if self.engine is None:
            return False
        for name, value in ran.items():
            mine = self.engine[name]
            higher = name != LIVE[2] and float(value or 0) > float(mine or 0)
            if mine != value and (name not in LIVE or higher):
                return False
        return True

    def replay(self, candidate: Candidate, screened: bool, case: judge.Case | None) -> None:
        """Measure what runs now as the next trial, in full or until it is judged."""
        ran, number = self.ran(candidate), len(self.trials)
        result = self.world.truth(ran, self.engine if screened else None)
        assert isinstance(result, Result)
        columns, noisy = self._noisy(result, ran, number, screened)
        stop = None if case is None else _judged(case, columns, noisy)
        measured = _values(columns, noisy, len(columns.row))
        self.spent += stop[0] if stop else _replay_s(noisy)
        if stop is None:
            self.columns[number] = columns
            state, kind, values = TrialState.COMPLETE, "full", measured
        else:
            state, kind, values = TrialState.PRUNED, "estimate", stop[1]
        measurement = Measurement(values=values, kind=kind) if values else None  # type: ignore[arg-type]
        self.add(candidate, state, screened=screened, measurement=measurement)
        if stop is None:
            self.log.append((self.spent, number))

    def _noisy(
        self, result: Result, ran: Candidate, number: int, screened: bool
    ) -> tuple[judge.Columns, Mapping[str, Array]]:
        rng = np.random.default_rng((self.seed, number, 77))
        factors = np.exp(NOISE * rng.standard_normal(3))
        if screened:
            own = np.random.default_rng(int(ran.digest[:8], 16))
            factors = factors * np.exp(SCREEN_BIAS * own.standard_normal(3))
        ttft, tpot, e2e = result.ttft * factors[0], result.tpot * factors[1], result.e2e * factors[2]
        slo = self.world.slo
        good = np.isfinite(e2e) & ~(ttft > (slo.ttft_ms or math.inf)) & ~(tpot > (slo.tpot_ms or math.inf))
        latency = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
        rows = np.arange(len(ttft))
        columns = judge.Columns(row=rows, good=good.astype(np.float64), latency=latency)
        return columns, {
            "ends": result.due - result.due.min() + e2e / 1e3,
            "due": result.due - result.due.min(),
        }

    def add(self, candidate: Candidate, state: TrialState, **more: object) -> None:
        measurement = more.get("measurement")
        number = len(self.trials)
        self.trials.append(
            Trial(
                id=number,
                study_id="bench",
                run_id="bench",
                number=number,
                candidate=candidate,
                state=state,
                origin=str(more.get("origin", "tpe")) if number else "baseline",
                screened=bool(more.get("screened", False)),
                measurements=(measurement,) if isinstance(measurement, Measurement) else (),
                violation=more.get("violation", Violation()),  # type: ignore[arg-type]
                cause=str(more["cause"]) if "cause" in more else None,
                effective=dict(self.ran(candidate)),
                started_at=NOW,
            )
        )

    def fail(self, candidate: Candidate, failure: Failure) -> None:
        self.add(candidate, TrialState.INFEASIBLE, violation=failure.violation, cause=failure.cause)

    def relaunch(self, candidate: Candidate, case: judge.Case | None = None) -> None:
        """A trial as everybody does it: a fresh engine and a replay."""
        failure = self.launch(self.ran(candidate))
        if failure is None:
            self.replay(candidate, screened=False, case=case)
        else:
            self.fail(candidate, failure)


def _replay_s(noisy: Mapping[str, Array]) -> float:
    ends = noisy["ends"][np.isfinite(noisy["ends"])]
    tail = float(ends.max()) - WINDOW_S if len(ends) else 20.0
    return LEAD_S + WINDOW_S + min(max(tail, 0.0), 20.0)


def _values(columns: judge.Columns, noisy: Mapping[str, Array], planned: int) -> dict[str, float]:
    names = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")
    values = {name: columns.fold(name) for name in names}
    rates = {
        "goodput_rps": float(columns.good.sum()) / WINDOW_S,
        "slo_attainment": float(columns.good.mean()),
    }
    return {**values, **rates}


def _judged(
    case: judge.Case, columns: judge.Columns, noisy: Mapping[str, Array]
) -> tuple[float, dict[str, float]] | None:
    """(seconds until the judge stops the replay, the estimate), None when it runs to its end."""
    rungs = [(share, judge.learned_margin(case, share, margin)) for share, margin in case.rungs]
    for now in np.arange(1.0, WINDOW_S + 20.0, 1.0):
        ended = columns.take(noisy["ends"] <= now)
        waiting = now - noisy["due"][(noisy["due"] < now) & ~(noisy["ends"] <= now)]
        reason = judge.curtail(case, judge.bounds(case, ended, waiting.tolist()))
        if reason is None and rungs and len(ended.row) >= rungs[0][0] * case.planned:
            reason = judge.rung(case, ended, rungs.pop(0)[1])
        if reason is not None and now < _replay_s(noisy) - LEAD_S:
            return LEAD_S + float(now), judge.estimate(case, ended)
    return None


def _case(bench: Bench) -> judge.Case:
    """What a replay is judged by now: the baseline and the front of what was measured in full."""
    leaders = proposals.leaders(bench.trials, OBJECTIVES)[:6]
    rivals = [
        judge.Rival(number=t.number, values=t.measurement.values, columns=bench.columns.get(t.number))
        for t in leaders if t.measurement
    ]  # fmt: skip
    base = bench.trials[0].measurement
    planned = len(next(iter(bench.columns.values())).row)
    return judge.Case(
        objectives=OBJECTIVES, slo=bench.world.slo, planned=planned, window_s=WINDOW_S,
        baseline=base.values if base else {}, rivals=tuple(rivals),
    )  # fmt: skip


# ---- ours


def ours(bench: Bench, savings: Savings) -> None:
    world = bench.world
    bench.relaunch(Candidate())
    bench.spent += LEAD_S + WINDOW_S  # the baseline's repeat
    predictor = world.predict if savings.simulator else None
    seeds = list(starts.heuristics(world.space, world.defaults))
    if predictor is not None:
        first = starts.predicted(
            world.space,
            predictor,
            seed=bench.seed,
            objectives=OBJECTIVES,
            baseline=world.defaults,
            known=known,
        )
        seeds = [*first, *seeds]
    barred: set[Candidate] = set()
    while bench.spent < bench.budget and not done(bench):
        if savings.live and _promote(bench):
            continue
        trials = bench.trials if savings.constraints else _without_failures(bench.trials)
        found = suggest(
            world.space, trials, seed=bench.seed, number=len(bench.trials), objectives=OBJECTIVES,
            baseline=Candidate(), known=lambda c: "failed" if c in barred else known(c), seeds=seeds,
            predictor=predictor, cost=(lambda c: _cost(bench, c)) if savings.cost_aware else None,
        )  # fmt: skip
        if found is None:
            return
        before = len(bench.trials)
        _try(bench, found.candidate, savings)
        bench.trials[before:] = [replace(t, origin=found.origin) for t in bench.trials[before:]]
        barred.update(t.candidate for t in bench.trials[before:] if t.state is TrialState.INFEASIBLE)


def _without_failures(trials: Sequence[Trial]) -> list[Trial]:
    """What a search sees that is not told of failures (they are only never repeated)."""
    return [t for t in trials if t.state is not TrialState.INFEASIBLE]


def _cost(bench: Bench, candidate: Candidate) -> float:
    ran = bench.ran(candidate)
    return LEAD_S + WINDOW_S + (CHANGE_S if bench.changeable(ran) else bench.launch_s(ran))


def _try(bench: Bench, candidate: Candidate, savings: Savings) -> None:
    case = _case(bench) if savings.early and bench.columns else None
    ran = bench.ran(candidate)
    if not savings.live:
        bench.relaunch(candidate, case)
        return
    if not bench.changeable(ran):
        wide = _wide(bench, ran)
        failure = bench.launch(wide)
        if failure is not None:
            bench.fail(wide, failure)
            return
    else:
        bench.spent += CHANGE_S
    bench.replay(candidate, screened=bench.engine != ran, case=case)


def _wide(bench: Bench, ran: Candidate) -> Candidate:
    """The candidate with its limits as high as may work, so that much else can be tried in its engine."""
    top = {name: bench.world.space.levels[name][-1] for name in LIVE[:2]}
    encoding = encode(bench.world.space, bench.world.defaults)
    regions = Regions(encoding, bench.trials)
    for wide in (Candidate({**ran, **top}), Candidate({**ran, "max_num_seqs": top["max_num_seqs"]})):
        point = encoding.point(wide)
        if known(wide) is None and point is not None and regions.reason(point) is None:
            return wide
    return ran


def _promote(bench: Bench) -> bool:
    """Relaunch the screened trial that adds most to the relaunched front, on every third trial."""
    number, base = len(bench.trials), bench.trials[0].measurement
    if base is None or number < 9 or number % 3:
        return False
    waiting = pareto.promotable(bench.trials, OBJECTIVES, [base.values[n] for n in OBJECTIVES])
    if not waiting:
        return False
    bench.relaunch(waiting[0].candidate)
    return True


# ---- rivals: full relaunch, full replay


def random_search(bench: Bench) -> None:
    rng = np.random.default_rng((bench.seed, 1))
    everything = bench.world.space.everything()
    _in_order(bench, [everything[int(i)] for i in rng.permutation(len(everything))])


def grid(bench: Bench) -> None:
    """The two knobs of vLLM's own auto-tune script, all combinations in a shuffled order."""
    rng = np.random.default_rng((bench.seed, 2))
    levels = bench.world.space.levels
    pairs = [Candidate({LIVE[0]: s, LIVE[1]: t}) for s in levels[LIVE[0]] for t in levels[LIVE[1]]]
    _in_order(bench, [pairs[int(i)] for i in rng.permutation(len(pairs))])


def _in_order(bench: Bench, candidates: Sequence[Candidate]) -> None:
    bench.relaunch(Candidate())
    for candidate in candidates:
        if bench.spent >= bench.budget or done(bench):
            return
        bench.relaunch(candidate)


def optuna_rival(bench: Bench, make: Callable[[int], optuna.samplers.BaseSampler], *, fail: bool) -> None:
    """Optuna's sampler over level indices; failures as violated constraints, or as FAIL like the peers."""
    space = bench.world.space
    study = optuna.create_study(directions=["minimize", "minimize", "maximize"], sampler=make(bench.seed))
    spaces: dict[str, optuna.distributions.BaseDistribution] = {
        n: optuna.distributions.IntDistribution(0, len(v) - 1) for n, v in space.levels.items()
    }
    bench.relaunch(Candidate())
    encoding = encode(space, bench.world.defaults)
    point = encoding.point(Candidate()) or ()
    study.enqueue_trial(dict(zip(encoding.names, point, strict=True)))
    first = study.ask(spaces)
    _tell(study, first, bench.trials[-1], fail)
    while bench.spent < bench.budget and not done(bench):
        trial = study.ask(spaces)
        bench.relaunch(Candidate({n: space.levels[n][trial.params[n]] for n in space.levels}))
        _tell(study, trial, bench.trials[-1], fail)


def _tell(study: optuna.Study, asked: optuna.Trial, ours_: Trial, fail: bool) -> None:
    values = told.objective_values(ours_, OBJECTIVES)
    if fail and ours_.state is TrialState.INFEASIBLE:
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
        return
    if not fail:
        for key, margin in told.margins(ours_).items():
            asked.set_constraint(key, margin)
    worst = [1e6, 1e4, 0.0]
    clipped = [min(v, w) if i < 2 else v for i, (v, w) in enumerate(zip(values or worst, worst, strict=True))]
    study.tell(asked, clipped)


METHODS: Mapping[str, Callable[[Bench], None]] = {
    "ours": lambda b: ours(b, Savings()),
    "TPE, constraints": lambda b: optuna_rival(b, lambda s: optuna.samplers.TPESampler(seed=s), fail=False),
    "TPE, crash = FAIL": lambda b: optuna_rival(b, lambda s: optuna.samplers.TPESampler(seed=s), fail=True),
    "NSGA-II": lambda b: optuna_rival(
        b, lambda s: optuna.samplers.NSGAIISampler(seed=s, population_size=12), fail=False
    ),
    "random": random_search,
    "two-knob grid": grid,
}
ABLATION: Mapping[str, Callable[[Bench], None]] = {
    "without simulator": lambda b: ours(b, Savings(simulator=False)),
    "without live limits": lambda b: ours(b, Savings(live=False)),
    "without early stop": lambda b: ours(b, Savings(early=False)),
    "without told failures": lambda b: ours(b, Savings(constraints=False)),
    "without cost-aware order": lambda b: ours(b, Savings(cost_aware=False)),
}


# ---- what an onlooker knows


def done(bench: Bench) -> bool:
    """Every goal reached, so the rest of the study would change no number of the table."""
    score = scores(bench)
    return all(v is not None for v in score.values())


_best: dict[str, tuple[float, float]] = {}


def best_of(world: World) -> tuple[float, float]:
    """(hypervolume of the whole table, goodput of its best SLO pick)."""
    if world.name not in _best:
        results = [
            r
            for r in map(world.truth, world.space.everything())
            if isinstance(r, Result) and finite(r.values)
        ]
        rows = [[r.values[n] for n in OBJECTIVES] for r in results]
        reference = _reference(world)
        meeting = [r.values["goodput_rps"] for r in results if _meets(world, r)]
        _best[world.name] = (pareto.hypervolume(rows, OBJECTIVES, reference), max(meeting, default=0.0))
    return _best[world.name]


def _reference(world: World) -> list[float]:
    base = world.truth(world.defaults)
    assert isinstance(base, Result)
    return [base.values[n] for n in OBJECTIVES]


def _meets(world: World, result: Result) -> bool:
    return result.values["slo_attainment"] >= world.slo.attainment * 0.985


GOALS = (*(f"{kind}{round(100 * share)}" for kind in ("any", "hv") for share in SHARES), "pick")


def scores(bench: Bench) -> dict[str, float | None]:
    """GPU-seconds at which each goal was reached; None = not yet. `any` counts screened trials too."""
    best, pick = best_of(bench.world)
    if not bench.goals:
        bench.goals = {goal: None for goal in GOALS}
        bench.goals["pick"] = None if pick else 0.0
    for at, number in bench.log[bench.scored :]:
        trial = bench.trials[number]
        true = bench.world.truth(bench.ran(trial.candidate))
        if not isinstance(true, Result) or not finite(true.values):
            continue
        for kind in ("any",) if trial.screened else ("any", "hv"):
            rows = bench.rows.setdefault(kind, [])
            rows.append([true.values[n] for n in OBJECTIVES])
            share = pareto.hypervolume(rows, OBJECTIVES, _reference(bench.world)) / best
            for goal in SHARES:
                _reach(bench, f"{kind}{round(100 * goal)}", at, share >= goal)
        if not trial.screened and bench.goals["pick"] is None:
            _reach(bench, "pick", at, _picked_well(bench, number, pick))
    bench.scored = len(bench.log)
    return bench.goals


def _reach(bench: Bench, goal: str, at: float, reached: bool) -> None:
    if reached and bench.goals[goal] is None:
        bench.goals[goal] = at


def _picked_well(bench: Bench, number: int, pick: float) -> bool:
    """Whether the pick among what was relaunched so far is truly within 5 % of the best pick."""
    known_now = [t for t in bench.trials[: number + 1] if not t.screened and t.state is TrialState.COMPLETE]
    chosen = pareto.choose(known_now, "slo", bench.world.slo, OBJECTIVES)
    true = bench.world.truth(bench.ran(chosen.candidate))
    return (
        isinstance(true, Result) and _meets(bench.world, true) and true.values["goodput_rps"] >= 0.95 * pick
    )


def one(job: tuple[str, str, str, int, float, str, str]) -> dict[str, JSON]:
    """One study: its scores, failures and seconds of our own time."""
    method, trace, card, seed, budget, folder, cache = job
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    world = load(trace, card, Path(folder), Path(cache))
    bench = Bench(world=world, seed=seed, budget=budget)
    begun = time.process_time()
    {**METHODS, **ABLATION}[method](bench)
    return {
        "method": method, "scenario": world.name, "seed": seed, **scores(bench), "spent": bench.spent,
        "trials": len(bench.trials), "failed": bench.failed, "own_s": time.process_time() - begun,
        "false_winner": _false_winner(bench),
    }  # fmt: skip


def _false_winner(bench: Bench) -> bool:
    """Whether the pick by measured values, unconfirmed, truly serves less goodput than the baseline."""
    relaunched = [t for t in bench.trials if not t.screened and t.state is TrialState.COMPLETE]
    chosen = pareto.choose(relaunched, "slo", bench.world.slo, OBJECTIVES)
    true, base = bench.world.truth(bench.ran(chosen.candidate)), bench.world.truth(bench.world.defaults)
    assert isinstance(true, Result)
    assert isinstance(base, Result)
    return not chosen.is_baseline and true.values["goodput_rps"] < base.values["goodput_rps"]


def table(rows: Sequence[Mapping[str, JSON]], methods: Sequence[str], budget: float) -> list[str]:
    """Median GPU-seconds per goal (who never arrives is charged the budget) and the share that arrived."""
    lines = ["| method | studies | " + " | ".join(GOALS) + " | failed launches | false winners |"]
    lines.append("|---" * (len(GOALS) + 4) + "|")
    for method in methods:
        mine = [r for r in rows if r["method"] == method]
        if not mine:
            continue
        cells = []
        for goal in GOALS:
            reached = [float(str(r[goal])) if r[goal] is not None else budget for r in mine]
            share = sum(r[goal] is not None for r in mine) / len(mine)
            cells.append(f"{statistics.median(reached):.0f} ({share:.0%})")
        failed = statistics.mean(float(str(r["failed"])) for r in mine)
        false = sum(bool(r["false_winner"]) for r in mine)
        lines.append(f"| {method} | {len(mine)} | " + " | ".join(cells) + f" | {failed:.1f} | {false} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", required=True, help="folder of the three traces")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ablation-seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=7200.0, help="GPU-seconds per study")
    parser.add_argument("--cache", default="/tmp/tuner-search-benchmark", help="where the tables are kept")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one card, two seeds")
    parser.add_argument("--methods", nargs="*", help="only these")
    parser.add_argument("--output", type=Path, help="file name without its ending: .json is written")
    asked = parser.parse_args()
    cards, seeds, fewer = (
        (CARD_NAMES, asked.seeds, asked.ablation_seeds) if not asked.quick else (CARD_NAMES[:1], 2, 2)
    )
    methods = asked.methods or [*METHODS, *ABLATION]
    jobs = [
        (method, trace, card, seed, asked.budget, asked.traces, asked.cache)
        for trace in TRACES for card in cards for method in methods
        for seed in range(fewer if method in ABLATION else seeds)
    ]  # fmt: skip
    with multiprocessing.Pool(asked.jobs) as pool:
        rows = []
        for row in pool.imap_unordered(one, jobs, chunksize=1):
            rows.append(row)
            if asked.output:
                asked.output.with_suffix(".json").write_text(json.dumps(rows, indent=0) + "\n")
    print("\n".join(table(rows, methods, asked.budget)))


if __name__ == "__main__":
    main()
