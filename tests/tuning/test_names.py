"""What a study names by name stays there to be named again."""

from pathlib import Path

from tests.tuning.studies import TRACE, VIRTUAL, answer, tuner, write


def test_a_study_of_the_latest_trace_of_a_name_is_tuned_twice(tmp_path: Path) -> None:
    """One trial is the baseline alone: nothing was served by a candidate, and no challenger."""
    study = write(tmp_path, VIRTUAL.replace(str(TRACE), "latest:conversation"))
    assert tuner(tmp_path, "trace", "import", TRACE, "--name", "conversation").returncode == 0
    told = [answer(tmp_path, "tune", study, "--trials", trials, "--json") for trials in (1, 1)]
    runs = [found["run"] for found in told]
    assert [run["state"] for run in runs] == ["FINISHED", "FINISHED"]  # type: ignore[index]
    assert runs[0]["summary"]["verdict"] == "nothing served"  # type: ignore[index]
    assert runs[0]["study_id"] == runs[1]["study_id"]  # type: ignore[index]
