"""What `benchmarks/search.py` compares: the product's search, with savings switched off, and its rivals."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optuna
import search_truth
from search_bench import CHANGE_S, Bench
from search_truth import OBJECTIVES, Failure

import tuner
from tuner.records import Candidate, Trial, TrialState
from tuner.search import early_stopping, trial_view
from tuner.search.encoding import encode
from tuner.simulator.calibrate import Calibration
from tuner.simulator.options import Options
from tuner.simulator.predict import Predictor
from tuner.tuning.calibrated_predictor import RELAUNCHED, Knowledge, Known, predictor_of, screens
from tuner.tuning.early_stopping import case_of
from tuner.tuning.live import fits, widest
from tuner.tuning.next_trial import propose
from tuner.tuning.study import Prepared

TWO = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What of the search is switched on."""

    simulator: bool = True
    calibration: bool = True
    live: bool = True
    early: bool = True
    constraints: bool = True


class Unlimited(Predictor):
    """The predictor, simulating once where only cache that is never filled differs: the same numbers."""

    def values(self, options: Options, slower: float = 1.0) -> dict[str, float]:
        limits = options.limits
        key = (replace(limits, num_blocks=0), slower)
        done: list[tuple[int, dict[str, float]]] = self._alike().setdefault(key, [])
        for blocks, found in done:
            used = found.get("kv_usage_max", 1.0) * blocks
            if blocks == limits.num_blocks or used < 0.98 * min(blocks, limits.num_blocks):
                return found
        done.append((limits.num_blocks, super().values(options, slower)))
        return done[-1][1]

    def _alike(self) -> dict[object, list[tuple[int, dict[str, float]]]]:
        kept: dict[object, list[tuple[int, dict[str, float]]]] = self.__dict__.setdefault("_kept", {})
        return kept


FITTED: dict[str, tuple[Calibration, Predictor]] = {}
"""Calibrations of this process by what they were fitted to: the same for every switch."""


class Kept(Knowledge):
    """The product's knowledge; what it works out is kept for the next study of the scenario."""

    def __init__(self, prepared: Prepared, savings: Savings) -> None:
        super().__init__(prepared=prepared)
        self._savings = savings

    def calibrated(self, chosen: Sequence[Trial]) -> Known | None:
        if not self._savings.simulator:
            return None
        if not self._savings.calibration:
            return self._uncalibrated()
        return super().calibrated(chosen)

    def known(self, trials: Sequence[Trial], number: int) -> Known | None:
        return super().known(trials, number) if self._savings.simulator else None

    def _calibrate(self, chosen: Sequence[Trial]) -> Known | None:
        name = f"{self.prepared.study.name} {[(t.candidate.digest, t.measurement) for t in chosen]}"
        key = hashlib.sha256(name.encode()).hexdigest()
        if key not in FITTED:
            found = super()._calibrate(chosen)
            if found is None or found.calibration is None:
                return found
            FITTED[key] = (found.calibration, self._quick(found.calibration))
        calibration, predict = FITTED[key]
        return Known(predict=predict, calibration=calibration)  # type: ignore[arg-type]

    def _quick(self, calibration: Calibration) -> Predictor:
        from tuner.simulator.cost import CARDS
        from tuner.tuning.calibrated_predictor import scene_of

        scene = scene_of(self.prepared, CARDS[self.prepared.file.engine.card])
        return predictor_of(scene, calibration, Unlimited)


def ours(bench: Bench, savings: Savings) -> None:
    """`tuner tune` without its confirmation: propose, screen or launch, judge."""
    prepared = bench.world.prepared
    if not savings.live:
        prepared = replace(prepared, file=prepared.file.model_copy(update={"live_limits": "off"}))
    knowledge = Kept(prepared, savings)
    barred: set[Candidate] = set()
    failed: set[Candidate] = set()
    asking = prepared if savings.constraints else replace(prepared, rules=False)
    while not bench.over:
        trials = bench.trials
        if not savings.constraints:
            trials = [t for t in trials if t.state is not TrialState.INFEASIBLE]
        found = propose(asking, trials, knowledge=knowledge)
        if found is None:
            return
        if not savings.constraints and found.candidate in failed:
            bench.charge("failed launches", 1.0)
        searched = found.origin not in (RELAUNCHED, "baseline")
        screened = searched and screens(prepared, bench.trials)
        case = None
        if savings.early and searched:
            case = case_of(prepared, bench.trials, screened=screened, columns=bench.requests)
        if screened and _screen(bench, prepared, found.candidate, found.origin, case, barred):
            continue
        bench.relaunch(found.candidate, case, found.origin)
        if screened:  # it was launched without the class that changes limits
            bench.engine = None


def _screen(
    bench: Bench,
    prepared: Prepared,
    candidate: Candidate,
    origin: str,
    case: early_stopping.Case | None,
    barred: set[Candidate],
) -> bool:
    """As `tuning.live.Live` does it; False where the candidate has to be launched by itself."""
    defaults, begun = trial_view.defaults_of(bench.trials), bench.spent
    if isinstance(bench.world.truth(bench.world.ran(candidate)), Failure):
        return False
    if bench.engine is None or fits(prepared, bench.engine, candidate, defaults) is None:
        wide = next((c for c in widest(prepared, candidate) if c not in barred), None)
        if wide is None:
            return False
        if bench.launch(wide) is not None:
            barred.add(wide)
            return False
    bench.charge("changes", CHANGE_S)
    bench.replay(candidate, screened=True, case=case, origin=origin, begun=begun)
    return True


# ---- rivals: full relaunch, full replay


def random_search(bench: Bench) -> None:
    rng = np.random.default_rng((bench.seed, 1))
    levels = bench.world.levels
    drawn = ({n: v[int(rng.integers(len(v)))] for n, v in levels.items()} for _ in range(1000))
    _in_order(bench, [Candidate(point) for point in drawn])


def grid(bench: Bench) -> None:
    """The two knobs of vLLM's own auto-tune script, all combinations in a shuffled order."""
    rng = np.random.default_rng((bench.seed, 2))
    levels = bench.world.levels
    pairs = [Candidate({TWO[0]: s, TWO[1]: t}) for s in levels[TWO[0]] for t in levels[TWO[1]]]
    _in_order(bench, [pairs[int(i)] for i in rng.permutation(len(pairs))])


def _in_order(bench: Bench, candidates: Sequence[Candidate]) -> None:
    bench.relaunch(Candidate())
    for candidate in candidates:
        if bench.over:
            return
        bench.relaunch(candidate)


def optuna_rival(bench: Bench, make: Callable[[int], optuna.samplers.BaseSampler], *, fail: bool) -> None:
    """Optuna's sampler over level indices; failures as violated constraints, or as FAIL like the peers."""
    study = optuna.create_study(directions=["minimize", "minimize", "maximize"], sampler=make(bench.seed))
    levels = bench.world.levels
    spaces: dict[str, optuna.distributions.BaseDistribution] = {
        n: optuna.distributions.IntDistribution(0, len(v) - 1) for n, v in levels.items()
    }
    bench.relaunch(Candidate())
    encoding = encode(bench.world.prepared.space, bench.world.defaults)
    point = encoding.point(Candidate()) or ()
    study.enqueue_trial(dict(zip(encoding.names, point, strict=True)))
    _tell(study, study.ask(spaces), bench.trials[-1], fail)
    while not bench.over:
        trial = study.ask(spaces)
        bench.relaunch(Candidate({n: values[trial.params[n]] for n, values in levels.items()}))
        _tell(study, trial, bench.trials[-1], fail)


def _tell(study: optuna.Study, asked: optuna.Trial, measured: Trial, fail: bool) -> None:
    values = trial_view.objective_values(measured, OBJECTIVES)
    if fail and measured.state is TrialState.INFEASIBLE:
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
        return
    if not fail:
        for key, margin in trial_view.margins(measured).items():
            asked.set_constraint(key, margin)
    worst = [1e6, 1e4, 0.0]
    clipped = [min(v, w) if i < 2 else v for i, (v, w) in enumerate(zip(values or worst, worst, strict=True))]
    study.tell(asked, clipped)


def _tpe(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed)


def _multivariate(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, multivariate=True)


METHODS: Mapping[str, Callable[[Bench], None]] = {
    "ours": lambda b: ours(b, Savings()),
    "TPE, constraints": lambda b: optuna_rival(b, _tpe, fail=False),
    "TPE, multivariate": lambda b: optuna_rival(b, _multivariate, fail=False),
    "TPE, crash = FAIL": lambda b: optuna_rival(b, _tpe, fail=True),
    "NSGA-II": lambda b: optuna_rival(
        b, lambda s: optuna.samplers.NSGAIISampler(seed=s, population_size=12), fail=False
    ),
    "random": random_search,
    "two-knob grid": grid,
}
ABLATION: Mapping[str, Callable[[Bench], None]] = {
    "without simulator": lambda b: ours(b, Savings(simulator=False)),
    "without calibration": lambda b: ours(b, Savings(calibration=False)),
    "without live limits": lambda b: ours(b, Savings(live=False)),
    "without early stop": lambda b: ours(b, Savings(early=False)),
    "without told failures": lambda b: ours(b, Savings(constraints=False)),
}


def digest(method: str) -> str:
    """Of the code that a method's rows come from: they are kept as long as nothing of it changes."""
    here, rooms = Path(search_truth.__file__).parent, Path(tuner.__file__).parent
    files = [here / "search_truth.py", here / "search_bench.py"]
    if method == "ours" or method in ABLATION:
        named = ("proposing", "knowledge", "judging", "live")
        own = [*(rooms / "tuning" / f"{name}.py" for name in named), here / "search_methods.py"]
        files += [*own, *sorted((rooms / "search").glob("*.py")), *sorted((rooms / "simulator").glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
