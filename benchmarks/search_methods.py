"""What `benchmarks/search.py` compares: the product's search, with savings switched off, and its rivals."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import search_truth
from search_bench import CHANGE_S, Bench
from search_truth import Failure

import tuner
from tuner.records import Candidate, Prediction, Trial, TrialState
from tuner.search import acquisition, trial_view
from tuner.search.acquisition import Predict
from tuner.search.trial_view import encode
from tuner.simulator.cost import preset
from tuner.simulator.options import Options
from tuner.simulator.predict import Batch, Predictor
from tuner.tuning import early_stopping
from tuner.tuning.attempt import fits
from tuner.tuning.context import OWN_ENGINE, RELAUNCHED, screens
from tuner.tuning.early_stopping import case_of
from tuner.tuning.next_trial import CalibratedPredictor, StudyPredictor, predictor_of, propose
from tuner.tuning.study import Prepared

TWO = ("max_num_seqs", "max_num_batched_tokens")


Wrong = Callable[[Prepared, Predict], Predict]


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


FITTED: dict[str, CalibratedPredictor] = {}
"""Calibrated simulators of this process by what they were fitted to: the same for every switch."""


class Kept(StudyPredictor):
    """The product's predictor; what it works out is kept for the next study of the scenario. `wrong` makes of
    a simulator's word what a sabotaged one says.
    """

    def __init__(self, prepared: Prepared, savings: Savings, wrong: Wrong | None = None) -> None:
        super().__init__(prepared=prepared)
        self._savings, self._wrong = savings, wrong

    def calibrated(self, trials: Sequence[Trial]) -> CalibratedPredictor | None:
        found = super().calibrated(trials) if self._savings.simulator else None
        if found is None or self._wrong is None:
            return found
        return replace(found, predict=self._wrong(self.prepared, found.predict))

    def _calibrated(self, base: Trial | None) -> CalibratedPredictor | None:
        if not self._savings.calibration:
            base = None
        key = f"{self.prepared.study.id} {base and base.measurement}"
        if key not in FITTED:
            found = super()._calibrated(base)
            if found is None:
                return None
            scene, fitted = found.predict.scene, found.calibration
            kind = predictor_of(scene, fitted, Unlimited) if fitted else Unlimited(scene, preset(scene.card))
            FITTED[key] = replace(found, predict=Batch(kind, workers=0))
        return FITTED[key]


def ours(bench: Bench, savings: Savings, wrong: Wrong | None = None, sampler: str = "tuner") -> None:
    """`tuner tune` without its confirmation; its seed is the benchmark's."""
    prepared = seeded(bench)
    prepared = replace(prepared, file=prepared.file.model_copy(update={"sampler": sampler}))
    if not savings.live:
        prepared = replace(prepared, file=prepared.file.model_copy(update={"live_limits": "off"}))
    predictor = Kept(prepared, savings, wrong)
    barred: set[Candidate] = set()
    failed: set[Candidate] = set()
    asking = prepared if savings.constraints else replace(prepared, rules=False)
    while not bench.over:
        trials = bench.trials
        if not savings.constraints:
            trials = [t for t in trials if t.state is not TrialState.INFEASIBLE]
        found = propose(asking, trials, predictor=predictor)
        if found is None:
            return
        if not savings.constraints and found.candidate in failed:
            bench.charge("failed launches", 1.0)
        searched = found.origin not in (RELAUNCHED, "baseline")
        screened = searched and found.origin not in OWN_ENGINE and screens(prepared, bench.trials)
        case = None
        if savings.early and searched:
            case = case_of(prepared, bench.trials, screened=screened, columns=bench.requests)
        if screened and _screen(bench, prepared, found.candidate, found.origin, case, barred):
            continue
        bench.relaunch(found.candidate, case, found.origin)
        if screened:  # it was launched without the class that changes limits
            bench.engine = None


def seeded(bench: Bench) -> Prepared:
    """The scenario's study with the benchmark's seed."""
    prepared = bench.world.prepared
    return replace(prepared, study=replace(prepared.study, seed=bench.seed))


def _screen(
    bench: Bench,
    prepared: Prepared,
    candidate: Candidate,
    origin: str,
    case: early_stopping.Case | None,
    barred: set[Candidate],
) -> bool:
    """As `tuning.attempt.ScreeningEngine` does it; False where the candidate has to be launched by itself."""
    defaults, begun = trial_view.defaults_of(bench.trials), bench.spent
    if isinstance(bench.world.truth(bench.world.ran(candidate)), Failure):
        return False
    engine = bench.engine
    if (
        engine is None
        or not bench.world.holds(engine, candidate)
        or fits(prepared, engine, candidate, defaults) is None
    ):
        wide = next((c for c in bench.world.engines(candidate) if c not in barred), None)
        if wide is None:
            return False
        if bench.launch(wide) is not None:
            barred.add(wide)
            return False
    bench.charge("changes", CHANGE_S)
    bench.replay(candidate, screened=True, case=case, origin=origin, begun=begun)
    return True


# ---- simulators that are wrong


def shuffled(prepared: Prepared, predict: Predict) -> Predict:
    """Every candidate is told what another measures."""
    encoding = encode(prepared.space, {})
    others = [encoding.candidate(p) for p in acquisition.pool(encoding, prepared.study.seed)]
    others = [c for c in others if prepared.known_failure(c) is None]
    return lambda found: predict([others[int(c.digest[:8], 16) % len(others)] for c in found])


def inverted(prepared: Prepared, predict: Predict) -> Predict:
    """The better the worse, around the baseline: half is told as double."""
    base = predict([prepared.baseline])[0].values

    def turned(values: Mapping[str, float]) -> dict[str, float]:
        return {n: base.get(n, v) ** 2 / v if v > 0 else v for n, v in values.items()}

    return lambda found: [
        replace(p, values=turned(p.values), fast=turned(p.slow), slow=turned(p.fast)) for p in predict(found)
    ]


def hopeless(prepared: Prepared, predict: Predict) -> Predict:
    """Everything fails."""
    return lambda found: [Prediction(values={}, feasible=False) for _ in found]


def constant(prepared: Prepared, predict: Predict) -> Predict:
    """Everything is as the baseline."""
    base = predict([prepared.baseline])[0]
    return lambda found: [base for _ in found]


# ---- rivals: on the same engine room as ours (known rules, live limits, early stop), or without it


def plain_order(bench: Bench, candidates: Iterable[Candidate], *, live: bool = False) -> None:
    """Candidates one after the other, under the early stop: each in an engine of its own, or with `live` in
    the running engine where that can be.
    """
    prepared, barred = seeded(bench), set[Candidate]()
    bench.relaunch(prepared.baseline)
    for candidate in candidates:
        if bench.over:
            return
        if prepared.known_failure(candidate) is not None:
            continue
        case = case_of(prepared, bench.trials, screened=live, columns=bench.requests)
        if not (live and _screen(bench, prepared, candidate, "random", case, barred)):
            bench.relaunch(candidate, case)


def random_search(bench: Bench, *, live: bool = False) -> None:
    plain_order(bench, bench.world.drawn(np.random.default_rng((bench.seed, 1))), live=live)


def grid(bench: Bench, *, live: bool = False) -> None:
    """The two knobs of vLLM's own auto-tune script, all combinations in a shuffled order."""
    rng, pairs = np.random.default_rng((bench.seed, 2)), bench.world.grid(TWO)
    plain_order(bench, (pairs[int(i)] for i in rng.permutation(len(pairs))), live=live)


def optuna_rival(bench: Bench, name: str, *, live: bool) -> None:
    """An Optuna sampler on log costs and index levels, seeded by the benchmark, in our engine room: known
    rules, early stop, and live limits where `live`.
    """
    ours(bench, Savings(simulator=False, live=live), sampler=name)


RIVALS: Mapping[str, Callable[[Bench], None]] = {
    "TPE": lambda b: optuna_rival(b, "tpe", live=False),
    "TPE, live limits": lambda b: optuna_rival(b, "tpe", live=True),
    "GPSampler": lambda b: optuna_rival(b, "gp", live=False),
    "NSGA-II": lambda b: optuna_rival(b, "nsga2", live=False),
    "random": random_search,
    "two-knob grid": grid,
}
LIVE: Mapping[str, Callable[[Bench], None]] = {
    "random, live limits": lambda b: random_search(b, live=True),
    "two-knob grid, live limits": lambda b: grid(b, live=True),
}
"""More rivals on the measured tables."""
SABOTAGE: Mapping[str, Callable[[Bench], None]] = {
    "shuffled": lambda b: ours(b, Savings(), shuffled),
    "inverted": lambda b: ours(b, Savings(), inverted),
    "infeasible": lambda b: ours(b, Savings(), hopeless),
    "constant": lambda b: ours(b, Savings(), constant),
}
ABLATION: Mapping[str, Callable[[Bench], None]] = {
    "without simulator": lambda b: ours(b, Savings(simulator=False)),
    "without calibration": lambda b: ours(b, Savings(calibration=False)),
    "without live limits": lambda b: ours(b, Savings(live=False)),
    "without early stop": lambda b: ours(b, Savings(early=False)),
    "without told failures": lambda b: ours(b, Savings(constraints=False)),
}
METHODS: Mapping[str, Callable[[Bench], None]] = {
    "ours": lambda b: ours(b, Savings()), **RIVALS, **ABLATION, **SABOTAGE, **LIVE,
}  # fmt: skip


def digest(method: str) -> str:
    """Of the code that a method's rows come from: they are kept as long as nothing of it changes."""
    here, rooms = Path(search_truth.__file__).parent, Path(tuner.__file__).parent
    files = [here / name for name in ("search_truth.py", "search_bench.py", "search_methods.py")]
    own = [rooms / "tuning" / f"{n}.py" for n in ("next_trial", "early_stopping", "attempt", "winner")]
    files += [*own, *sorted((rooms / "search").glob("*.py"))]
    files += [] if method in RIVALS else sorted((rooms / "simulator").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
