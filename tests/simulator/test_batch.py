"""Predictions spread over processes are the predictions of one."""

from tests.simulator.test_predict import scene
from tuner.records import Candidate
from tuner.simulator.cost import Coefficients
from tuner.simulator.predict import SHARE, Batch, Predictor


def test_two_processes_say_what_one_says() -> None:
    asked = [Candidate({"max_num_seqs": 8 * n}) for n in range(1, 2 * SHARE + 1)]
    alone = Predictor(scene(), Coefficients(), spreads=False)
    spread = Predictor(scene(), Coefficients(), spreads=False)
    assert Batch(spread, workers=2)(asked) == alone(asked)
    assert spread.unknown(asked) == []


def test_few_candidates_start_no_process() -> None:
    predictor = Predictor(scene(), Coefficients(), spreads=False)
    asked = [Candidate({"max_num_seqs": 8})]
    assert Batch(predictor, workers=64)(asked) == predictor(asked)
