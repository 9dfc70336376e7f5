"""Whether answers agree: known answers, known shares."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.tuning.studies import write
from tuner.errors import Aborted
from tuner.records import Candidate, Measurement, Trial, TrialState
from tuner.tuning import quality
from tuner.tuning.quality import Answer
from tuner.tuning.study import load

SPACE = """\
about: A knob that changes the output.
vllm: ">=0.10"
knobs:
  max_num_seqs: [4, 16]
  kv_cache_dtype: [auto, fp8]
"""


def answer(*tokens: int, logprob: float = -1.0) -> Answer:
    return Answer(tokens=tuple(f"token_id:{t}" for t in tokens), logprobs=(logprob,) * len(tokens))


def test_the_share_ends_at_the_first_token_that_differs() -> None:
    base = [answer(1, 2, 3, 4), answer(5, 6, 7, 8)]
    other = [answer(1, 2, 9, 4, logprob=-1.5), answer(5, 6, 7, 8)]
    found = quality.compared(base, other)
    assert found == {"token_agreement": 0.75, "logprob_distance": pytest.approx(2 * 0.5 / 6)}


def test_the_same_answers_agree_wholly() -> None:
    base = [answer(1, 2, 3)]
    assert quality.compared(base, base) == {"token_agreement": 1.0, "logprob_distance": 0.0}
    assert quality.verdict({"token_agreement": 1.0}, 0.99, ("dtype",)) is None


def test_a_candidate_that_answers_otherwise_is_refused_in_one_sentence() -> None:
    said = quality.verdict({"token_agreement": 0.5}, 0.99, ("kv_cache_dtype",))
    assert said is not None
    assert "50.0%" in said
    assert "kv_cache_dtype" in said


def test_only_knobs_that_change_the_output_count() -> None:
    base = Candidate({"max_num_seqs": 4})
    assert quality.changes(base.with_values(max_num_seqs=16), base) == ()
    assert quality.changes(base.with_values(kv_cache_dtype="fp8"), base) == ("kv_cache_dtype",)


def test_answers_are_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    assert quality.kept(path) == ()
    quality.keep(path, [answer(1, 2)])
    assert quality.kept(path) == (answer(1, 2),)


def test_a_completion_is_read_token_by_token() -> None:
    said = {"choices": [{"logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.25]}}]}
    assert quality.parse(said) == Answer(tokens=("token_id:7",), logprobs=(-0.25,))  # type: ignore[arg-type]
    with pytest.raises(Aborted, match="log probabilities"):
        quality.parse({"choices": [{"logprobs": None}]})


def test_without_weights_it_says_that_it_cannot_judge(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    turned = load(write(tmp_path, space=SPACE), store=None, now=now)
    said = quality.why_not(turned)
    assert said is not None
    assert said.startswith("kv_cache_dtype may change the output")
    (tmp_path / "plain").mkdir()
    assert quality.why_not(load(write(tmp_path / "plain"), store=None, now=now)) == (
        "no knob of the space changes the output"
    )


def test_what_was_not_judged_is_told(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    simulated = load(write(tmp_path, space=SPACE), store=None, now=now)
    real = replace(simulated, facts=replace(simulated.facts, kind="vllm"))
    asked = Candidate({"max_num_seqs": 4, "kv_cache_dtype": "fp8"})
    judged = Trial(
        id=2, study_id="s", run_id="r", number=1, candidate=asked, origin="tpe", started_at=now,
        state=TrialState.COMPLETE, measurements=(Measurement(values={quality.AGREEMENT: 1.0}),),
    )  # fmt: skip
    plain = replace(judged, number=2, measurements=(Measurement(values={"goodput_rps": 1.0}),))
    same = replace(plain, number=3, candidate=Candidate({"max_num_seqs": 16}))
    assert quality.told(real, [judged, same]) == "judged by greedy canary prompts"
    assert quality.told(real, [judged, plain, same]).startswith("not judged in trials 2: the baseline's own")
    assert quality.told(simulated, [judged, plain]) == quality.why_not(simulated)


def test_the_canaries_are_the_same_for_every_candidate() -> None:
    assert quality.canaries(1000, 3) == quality.canaries(1000, 3)
    assert all(10 <= t < 1000 for prompt in quality.canaries(1000, 3) for t in prompt)
