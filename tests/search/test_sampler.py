"""`TunerSampler` in an Optuna study of a user's own."""

from collections.abc import Sequence

import optuna
import pytest

from tests.search.queue_world import DEFAULTS, LEVELS, OBJECTIVES, SLO, Engine, calibrated
from tuner.records import Candidate, Prediction
from tuner.search.sampler import TunerSampler, levels_of

TRUTH = Engine()
ASKED = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling")


def objective(trial: optuna.Trial) -> Sequence[float]:
    """Every kind of parameter: a choice, a logarithmic range, one with a step, a float, a switch."""
    asked = {
        "max_num_seqs": trial.suggest_categorical("max_num_seqs", list(LEVELS["max_num_seqs"])),
        "max_num_batched_tokens": trial.suggest_int("max_num_batched_tokens", 512, 16384, log=True),
        "long_prefill_token_threshold": trial.suggest_int("long_prefill_token_threshold", 0, 2048, step=512),
        "gpu_memory_utilization": trial.suggest_float("gpu_memory_utilization", 0.8, 0.95),
        "async_scheduling": trial.suggest_categorical("async_scheduling", [False, True]),
    }
    values = TRUTH.values(Candidate(asked))
    trial.set_constraint("oom", 1.0 if values is None else -1.0)
    return [1e6, 1e6, 0.0] if values is None else [values[name] for name in OBJECTIVES]


def study(trials: int, predict: object = None, seed: int = 1) -> tuple[optuna.Study, TunerSampler]:
    turned = ("long_prefill_token_threshold", "gpu_memory_utilization", *ASKED)
    baseline = {name: DEFAULTS[name] for name in turned}
    sampler = TunerSampler(
        objectives=OBJECTIVES, slo=SLO, baseline=baseline, predict=predict, seed=seed,  # type: ignore[arg-type]
        allowed=lambda candidate: candidate.get("max_num_seqs") != 16,
    )  # fmt: skip
    made = optuna.create_study(directions=["minimize", "minimize", "maximize"], sampler=sampler)
    made.optimize(objective, n_trials=trials)
    return made, sampler


def test_it_begins_with_the_baseline_keeps_the_rules_and_repeats_nothing() -> None:
    made, _ = study(10)
    first = made.trials[0].params
    assert (first["max_num_seqs"], first["max_num_batched_tokens"]) == (1024, 8192)
    assert all(t.params["max_num_seqs"] != 16 for t in made.trials[1:])
    assert len({tuple(sorted(t.params.items())) for t in made.trials}) == 10


def test_the_same_study_and_seed_propose_the_same() -> None:
    one, other, another = study(6)[0], study(6)[0], study(6, seed=2)[0]
    assert [t.params for t in one.trials] == [t.params for t in other.trials]
    assert [t.params for t in one.trials] != [t.params for t in another.trials]


def test_a_simulator_of_the_users_own_is_listened_to() -> None:
    def predict(candidates: Sequence[Candidate]) -> list[Prediction]:
        return calibrated(TRUTH).predict(candidates)

    made, sampler = study(5, predict)
    assert sampler.proposed_by == "simulator"
    base, best = made.trials[0].values, max(made.trials, key=lambda t: t.values[2]).values
    assert best[2] > 3 * base[2]


@pytest.mark.parametrize(
    ("distribution", "some"),
    [
        (optuna.distributions.IntDistribution(1, 5), (1, 2, 3, 4, 5)),
        (optuna.distributions.IntDistribution(0, 100, step=25), (0, 25, 50, 75, 100)),
        (optuna.distributions.FloatDistribution(0.0, 1.0, step=0.5), (0.0, 0.5, 1.0)),
        (optuna.distributions.CategoricalDistribution(("a", None, True)), ("a", None, True)),
    ],
)
def test_levels_are_the_values_of_a_distribution(
    distribution: optuna.distributions.BaseDistribution, some: tuple[object, ...]
) -> None:
    assert levels_of(distribution) == some


@pytest.mark.parametrize(
    "distribution",
    [
        optuna.distributions.IntDistribution(1, 10**6, log=True),
        optuna.distributions.IntDistribution(0, 7 * 10**5, step=7),
        optuna.distributions.FloatDistribution(1e-5, 1.0, log=True),
        optuna.distributions.FloatDistribution(0.0, 1.0),
    ],
)
def test_levels_of_a_wide_range_are_few_and_inside_it(
    distribution: optuna.distributions.BaseDistribution,
) -> None:
    found = levels_of(distribution)
    assert 10 < len(found) < 140
    assert all(distribution._contains(distribution.to_internal_repr(value)) for value in found)
