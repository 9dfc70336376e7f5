"""A report is one file that tells what the history holds, and needs nothing from elsewhere."""

import math
import re
from datetime import UTC, datetime

import pytest

from tuner.records import JSON, Candidate, Measurement, Run, RunState, Slice, Slo, Study, Trial, TrialState
from tuner.report.document import ReportData, cell, markdown, render
from tuner.report.words import number, ratio

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
OBJECTIVES = ("ttft_p95_ms", "tpot_p95_ms", "goodput_rps")


def study() -> Study:
    return Study(
        id="ab" * 32, name="<chat> & co", model="m/7b", node="local", gpu_class="h100-80x1", workload="chat",
        engine_version="0.32.0", trace_digest="cd" * 32, space_digest="ef" * 32,
        slices=(Slice(name="peak", start_s=0, duration_s=60),), objectives=OBJECTIVES, slo=Slo(), seed=0,
        identity={}, spec={}, created_at=NOW,
    )  # fmt: skip


def trial(n: int, values: dict[str, float], state: TrialState = TrialState.COMPLETE) -> Trial:
    measured = (Measurement(values=values),) if values else ()
    return Trial(
        id=n + 1, study_id="ab" * 32, run_id="r", number=n, candidate=Candidate({"max_num_seqs": 8 * n}),
        state=state, origin="baseline" if n == 0 else "tpe", measurements=measured, started_at=NOW,
        reason=None if values else "refused <it>",
    )  # fmt: skip


TRIALS = (
    trial(0, {"ttft_p95_ms": 400.0, "tpot_p95_ms": 20.0, "goodput_rps": 4.0}),
    trial(1, {"ttft_p95_ms": 100.0, "tpot_p95_ms": 30.0, "goodput_rps": 6.0}),
    trial(2, {"ttft_p95_ms": math.inf, "tpot_p95_ms": 10.0, "goodput_rps": 1.0}),
    trial(3, {}, TrialState.INFEASIBLE),
)


def data(summary: dict[str, JSON] | None = None) -> ReportData:
    run = Run(id="r", study_id="ab" * 32, state=RunState.FINISHED, started_at=NOW, summary=summary or {})
    return ReportData(
        study=study(), trials=TRIALS, runs=[run], launches=[], commands=["tuner front chat"], generated_at=NOW
    )


def page(summary: dict[str, JSON] | None = None) -> str:
    return render(data(summary))


def test_it_needs_no_network_and_its_only_script_is_its_own() -> None:
    text = page()
    assert re.findall(r"""(?:src|href)=["']?http|url\(|<link|@import""", text) == []
    assert text.count("<script") == 1
    assert "default-src 'none'" in text
    assert len(text) < 200_000


def test_what_users_wrote_is_escaped() -> None:
    text = page()
    assert "<chat>" not in text
    assert "&lt;chat&gt; &amp; co" in text
    assert "refused &lt;it&gt;" in text


def test_every_trial_its_reason_and_the_change_are_there() -> None:
    text = page()
    assert "-75 %" in text
    assert "∞" in text
    assert "INFEASIBLE" in text
    assert "tuner front chat" in text


def test_the_markdown_twin_tells_the_same_and_breaks_no_table() -> None:
    text = markdown(data({"verdict": "clear winner", "sentence": "It | won.", "winner": 1}))
    assert "> **clear winner.** It \\| won." in text
    assert "# &lt;chat&gt; & co" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "| 1 (winner) | 100 | -75 % | 30 | +50 % | 6 | +50 % | max\\_num\\_seqs=8 |" in rows
    assert "refused &lt;it&gt;" in text
    assert cell("a\nb") == "a b"


def test_the_verdict_is_told_or_its_absence() -> None:
    assert "No run of this study has reached its verdict yet" in page()
    row: dict[str, JSON] = {"number": 1, "where": "held_out", "metric": "ttft_p95_ms", "ratio": 0.25,
           "low": 0.2, "high": None, "verdict": "better"}  # fmt: skip
    text = page({"verdict": "clear winner", "sentence": "It won.", "winner": 1, "demonstration": True,
                 "comparisons": [row]})  # fmt: skip
    assert "It won." in text
    assert "the held-out slice" in text
    assert "(winner)" in text


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (math.inf, "∞"), (1234.4, "1,234"), (0.12345, "0.1235"), (3, "3")]
)
def test_numbers_for_reading(value: object, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "base", "shown"), [(50.0, 100.0, "-50 %"), (None, 1.0, ""), (1.0, math.inf, ""), (1.0, 0.0, "")]
)
def test_the_change_against_the_baseline(value: float | None, base: float, shown: str) -> None:
    assert ratio(value, base) == shown
