"""`history` of a study: every value that is taken acts, and `raw` is refused with the reason."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.tuning.studies import STUDY, tuner, write
from tuner.errors import BadInput
from tuner.tuning import study as studies
from tuner.tuning import trial
from tuner.tuning.context import HostContext, LaunchJob, Pass
from tuner.tuning.study import parse


@pytest.mark.parametrize("value", ["raw", "sessions", "open", "none"])
def test_a_history_that_nobody_replays_is_refused(value: str) -> None:
    with pytest.raises(BadInput, match="history") as refused:
        parse(f"{STUDY}history: {value}\n", name="study")
    assert ("a trace keeps no text" in str(refused.value)) == (value == "raw")


def test_raw_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = tuner(tmp_path / "home", "tune", write(tmp_path, STUDY + "history: raw\n"))
    assert done.returncode == 2
    assert "a trace keeps no text" in done.stderr
    assert not (tmp_path / "home" / "tuner.db").exists()


@pytest.mark.parametrize(("value", "sent"), [("synthetic", "open"), ("session", "session"), ("live", "live")])
def test_a_history_reaches_the_replay(tmp_path: Path, value: str, sent: str) -> None:
    prepared = studies.load(write(tmp_path, f"{STUDY}history: {value}\n"), store=None, now=datetime.now(UTC))
    place = cast(
        HostContext, SimpleNamespace(prepared=prepared, cores=SimpleNamespace(sender=None), isolated=False)
    )
    order = cast(LaunchJob, SimpleNamespace(number=1, kv_tokens=None))
    each = cast(Pass, SimpleNamespace(repeat=0))
    assert trial.load_of(place, order, each, None).history == sent
