"""`tuner token` as it is typed, and versions that do not work together."""

from dataclasses import replace
from pathlib import Path

import psutil

from tests.service.world import World
from tests.tuning.studies import WATCHDOG_S, answer, tuner
from tuner import SERVICE_VERSION, __version__
from tuner.records import RunState
from tuner.service.runner import RunOrder


def test_a_token_is_made_shown_once_and_revoked(tmp_path: Path) -> None:
    words = ("token", "create", "--name", "ci", "--scope", "run", "--scope", "promote", "--expires", "90d")
    made = answer(tmp_path, *words, "--json")
    text, token = made["text"], made["token"]
    assert isinstance(token, dict)
    assert isinstance(text, str)
    listed = tuner(tmp_path, "token", "list")
    assert str(token["id"]) in listed.stdout
    assert text.rpartition("_")[2] not in listed.stdout
    assert tuner(tmp_path, "token", "revoke", token["id"], "--reason", "left").returncode == 0
    again = tuner(tmp_path, "token", "revoke", token["id"])
    assert again.returncode == 4
    assert text.rpartition("_")[2].encode() not in (tmp_path / "tuner.db").read_bytes()


def test_a_wrong_scope_or_age_is_one_sentence(tmp_path: Path) -> None:
    wrong = tuner(tmp_path, "token", "create", "--name", "ci", "--scope", "raed")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "did you mean 'read'" in wrong.stderr
    aged = tuner(tmp_path, "token", "create", "--name", "ci", "--scope", "read", "--expires", "soon")
    assert aged.returncode == 2
    assert "90d" in aged.stderr


def test_a_controller_refuses_a_service_of_another_version(tmp_path: Path) -> None:
    other = tuner(tmp_path, "tune", "study.yaml", more={SERVICE_VERSION: "9.9.9"})
    assert other.returncode == 5
    assert f"vllm-config-tuner 9.9.9, this command is {__version__}: restart the service" in other.stderr
    same = tuner(tmp_path, "token", "list", more={SERVICE_VERSION: __version__})
    assert "restart the service" not in same.stderr


def test_a_service_tells_its_controllers_which_version_it_is(filled: World) -> None:
    study = filled.store.studies()[-1]
    for run in filled.store.runs(state=RunState.RUNNING):
        filled.store.save_run(replace(run, state=RunState.FINISHED, ended_at=filled.clock()))
    order = RunOrder(
        study_id=study.id, study_file=filled.home / "no.yaml", trials=1, deadline=None, actor="a",
        at=filled.clock(), key=None,
    )  # fmt: skip
    run, _ = filled.runner.start(order)
    assert run.pid is not None
    assert psutil.Process(run.pid).environ()[SERVICE_VERSION] == __version__
    filled.runner._ours[run.id].wait(WATCHDOG_S)
