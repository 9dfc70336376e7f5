"""Whether answers agree: known answers, known shares."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.tuning.studies import STUDY, write
from tuner.errors import Aborted, BadInput
from tuner.records import Candidate, Measurement, Trial, TrialState
from tuner.tuning import quality
from tuner.tuning.finalists import finalists, left_out
from tuner.tuning.quality import CanaryAnswer
from tuner.tuning.study import Prepared, QualityFile, load

SPACE = """\
about: A knob that changes the output.
vllm: ">=0.10"
knobs:
  max_num_seqs: [4, 16]
  kv_cache_dtype: [auto, fp8]
"""


def answer(*tokens: int, logprob: float = -1.0) -> CanaryAnswer:
    return CanaryAnswer(tokens=tuple(f"token_id:{t}" for t in tokens), logprobs=(logprob,) * len(tokens))


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
    assert quality.parse(said) == CanaryAnswer(tokens=("token_id:7",), logprobs=(-0.25,))  # type: ignore[arg-type]
    with pytest.raises(Aborted, match="log probabilities"):
        quality.parse({"choices": [{"logprobs": None}]})


OFF = STUDY + "quality: off\n"


def test_M20_a_model_without_weights_turns_no_knob_that_changes_the_output(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    held = load(write(tmp_path, space=SPACE), store=None, now=now)
    assert set(held.space.levels) == {"max_num_seqs"}
    assert "they cannot be judged (quality: off allows it)" in held.space.dropped["kv_cache_dtype"]
    assert quality.why_not(held) == "no knob of the space changes the output"
    off = load(write(tmp_path, study=OFF, space=SPACE), store=None, now=now)
    assert off.space.levels["kv_cache_dtype"] == ("auto", "fp8")
    assert "quality: off" in (quality.why_not(off) or "")
    today = STUDY.replace("baseline: {max_num_seqs: 4}", "baseline: {max_num_seqs: 4, kv_cache_dtype: fp8}")
    kept = load(write(tmp_path, study=today, space=SPACE), store=None, now=now)
    assert kept.space.levels["kv_cache_dtype"] == ("fp8",)  # what runs today needs no judgement
    with pytest.raises(BadInput, match="kv_cache_dtype: it changes the answers"):
        load(write(tmp_path, space="knobs: {kv_cache_dtype: [auto, fp8]}"), store=None, now=now)


def judgeable(folder: Path, study: str = OFF) -> Prepared:
    """A study of a model with weights."""
    found = load(write(folder, study=study, space=SPACE), store=None, now=datetime.now(UTC))
    asked = found.file.model_copy(update={"quality": QualityFile()}) if study == OFF else found.file
    return replace(found, file=asked, facts=replace(found.facts, kind="vllm"))


def trial(number: int, candidate: Candidate, **values: float) -> Trial:
    measured = {"ttft_p95_ms": 100.0, "tpot_p95_ms": 9.0, "goodput_rps": 5.0, "slo_attainment": 1.0, **values}
    return Trial(
        id=number + 1, study_id="s", run_id="r", number=number, candidate=candidate, origin="tpe",
        started_at=datetime.now(UTC), state=TrialState.COMPLETE,
        measurements=(Measurement(values=measured),),
    )  # fmt: skip


FP8 = Candidate({"max_num_seqs": 4, "kv_cache_dtype": "fp8"})
JUDGED = {quality.AGREEMENT: 1.0}


def test_M20_what_was_not_judged_is_told_and_is_no_finalist(tmp_path: Path) -> None:
    real = judgeable(tmp_path)
    judged, unjudged = trial(1, FP8, **JUDGED), trial(2, FP8.with_values(max_num_seqs=16))
    same = trial(3, Candidate({"max_num_seqs": 16}), ttft_p95_ms=400.0)
    assert quality.summary(real, [judged, same]) == "judged by the answers to greedy test prompts"
    said = quality.summary(real, [judged, unjudged, same])
    assert said.startswith("not judged, so not published: trial 2 (")
    assert quality.held_back(real, unjudged) == (
        "it changes kv_cache_dtype, and its answers were not judged (quality: off allows this)"
    )
    assert [t.number for t in finalists(real, [unjudged, same], "r")] == [3]
    assert [t.number for t in finalists(real, [unjudged, judged], "r")] == [1]
    assert finalists(real, [unjudged], "r") == []
    assert left_out(real, [unjudged]) == [f"Trial 2 is not a finalist: {quality.held_back(real, unjudged)}."]
    screened = [replace(trial(n, FP8.with_values(max_num_seqs=8 * n)), screened=True) for n in range(3, 7)]
    told = left_out(real, [*screened, trial(7, screened[2].candidate)])
    assert [words.split()[1] for words in told] == ["7", "3", "4", "other"], "trial 7 is trial 5, relaunched"
    assert told[-1] == "1 other trial cannot win either."
    off = replace(real, file=real.file.model_copy(update={"quality": "off"}))
    assert [t.number for t in finalists(off, [unjudged], "r")] == [2]


def test_M20_what_only_a_later_pass_did_not_ask_again_is_judged(tmp_path: Path) -> None:
    """The confirmation asks no canaries: the search's own measurement counts."""
    found = trial(1, FP8, **JUDGED)
    again = replace(found.measurements[0], values={"goodput_rps": 5.0}, purpose="confirm")
    both = replace(found, measurements=(*found.measurements, again))
    assert quality.unjudged(judgeable(tmp_path), both) == ()


def test_the_canaries_are_the_same_for_every_candidate() -> None:
    assert quality.canaries(1000, 3) == quality.canaries(1000, 3)
    assert all(10 <= t < 1000 for prompt in quality.canaries(1000, 3) for t in prompt)
