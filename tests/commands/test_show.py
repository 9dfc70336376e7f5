"""What the commands that show things print."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.commands.test_care import call
from tests.history.records import NOW, a_launch, a_measurement, a_run, a_study, finished, start
from tests.tuning.studies import VIRTUAL, environment, tuner, write
from tuner.commands.common import program, text, write_file
from tuner.errors import Unavailable
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import JSON, Launch, RunState, Study, TrialState
from tuner.settings import runnable


def test_a_profile_s_evidence_is_shown_line_by_line(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study = a_study()
    trial = finished(store, start(store, a_run(store, study), 1), a_measurement(float("inf")))
    evidence: dict[str, JSON] = {"confirmed": False, "front": [1.5, None], "run": {"id": "r1", "gains": {}}}
    made = registry.publish(
        store, study=study, trial=trial, argv=(), env={}, evidence=evidence, now=NOW, alias=None
    )
    store.close()
    shown = call(tmp_path, "profile", "show", made.id)
    assert shown.exit_code == 0, shown.output
    lines = [line.strip() for line in shown.stdout.splitlines() if line.strip()]
    rows = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1:] for line in lines}
    assert rows["driver"] == rows["run.gains"] == ["–"]
    assert rows["values.goodput_rps"] == ["3.5"]
    assert rows["values.ttft_p95_ms"] == ["∞"]
    assert rows["slices"] == ["peak, held"]
    assert rows["front"] == ["1.5, –"]
    assert rows["run.id"] == ["r1"]
    assert not set("{}[]'") & set(shown.stdout.partition("evidence")[2])


def test_a_cell_never_shows_how_python_writes_a_value() -> None:
    assert text({"a": {"b": None}, "c": [1.25, "x"], "d": ()}) == "a b –  c 1.25, x  d –"


def an_engine(store: Store, study: Study, name: str, folder: Path, **ended: object) -> Launch:
    """One launch whose directory is named as the tuner names it."""
    launch = replace(a_launch(study, name), directory=str(folder), timeline={"ready_s": 4.0})
    store.add_launch(launch)
    return store.finish_launch(replace(launch, ended_at=NOW + timedelta(seconds=10), **ended))  # type: ignore[arg-type]


def test_timings_name_the_trial_of_every_launch(tmp_path: Path) -> None:
    """Of one that failed, of one that screened others too, and of the confirmation's."""
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study = a_study()
    run = a_run(store, study)
    places = {name: tmp_path / "trials" / name for name in ("0000-0", "0001-live-0", "0003-1")}
    for name, folder in places.items():
        an_engine(store, study, name, folder, verdict="oom: out of memory" if name == "0003-1" else None)
    an_engine(store, study, "again", tmp_path / "trials" / "0001-confirm-ab12cd34-2-0")
    finished(store, start(store, run, 0, origin="baseline"), a_measurement(launch_id="0000-0"))
    for number in (1, 2):
        again = [a_measurement(launch_id="again", purpose="confirm", repeat=2)] if number == 1 else []
        finished(store, start(store, run, number), a_measurement(launch_id="0001-live-0"), *again)
    finished(store, start(store, run, 3, attempt=1), state=TrialState.INFEASIBLE)
    store.add_launch(replace(a_launch(study, "now"), directory=str(tmp_path / "trials" / "0004-0")))
    lease = store.acquire_lease(study.node, run.host or "", now=datetime.now(UTC), ttl_s=3600)
    told = json.loads(call(tmp_path, "front", "chat", "--timings", "--json").stdout)["timings"]
    assert {row["launch"]: (row["trial"], row["trials"], row["for"], row["verdict"]) for row in told} == {
        "0000-0": (0, [0], "search", "measured"),
        "0001-live-0": (1, [1, 2], "search", "measured"),
        "0003-1": (3, [3], "search", "oom: out of memory"),
        "again": (1, [1], "confirmation", "measured"),
        "now": (4, [4], "search", "running"),
    }
    text = call(tmp_path, "front", "chat", "--timings").stdout
    assert "If an engine is kept for further trials, the time of each trial ends" in " ".join(text.split())
    assert "controller died" not in text
    store.release_lease(lease)
    store.close()
    lost = call(tmp_path, "front", "chat", "--timings").stdout
    before, lost = (said.partition("launches, and")[2] for said in (text, lost))
    assert lost == before.replace("–  running", "–  interrupted"), "its run has lost its process"
    assert lost != before
    assert "1, 2" in text
    assert "confirmation 2" in text
    assert {row["launch"]: (row["attempt"], row["repeat"]) for row in told}["again"] == (0, 2)
    assert re.search(r"^3\.1 +search ", text, re.MULTILINE), "a second attempt has the name of its trial"
    assert call(tmp_path, "trial", "show", "chat", "3.1").stdout.startswith("trial 3.1 "), "as tables name it"
    shown = call(tmp_path, "trial", "show", "chat", "1").stdout
    assert re.search(r"^measurement +search +confirmation 2$", shown, re.MULTILINE)
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    died = "controller: its controller died"
    an_engine(store, study, "killed", tmp_path / "trials" / "0003-confirm-ab12cd34-1-0", verdict=died)
    store.close()
    told = call(tmp_path, "front", "chat", "--timings").stdout
    assert "If a launch's controller died, these times end when the next command stopped the engine." in told
    assert re.search(r"^3\.1 +confirmation 1 ", told, re.MULTILINE), "the attempt that is measured again"
    assert "–  search" not in text, "a launch without a trial"


ENGINE_LOG = """\
INFO 11-28 22:50:08 [api_server.py:1] vLLM API server
(EngineCore pid=7) ValueError: No available memory for the cache blocks. Try increasing it.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
""" + "".join(f"INFO 11-28 22:50:09 line {n}\n" for n in range(60))


def test_the_log_of_a_failed_trial_begins_with_the_root_cause(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    trial = start(store, a_run(store, a_study()), 1)
    folder = tmp_path / "0001-0"
    folder.mkdir()
    (folder / "engine.log").write_text(ENGINE_LOG)
    ended = {"directory": str(folder), "reason": "no memory left for the KV cache", "cause": "no_kv_memory"}
    store.finish_trial(replace(trial, state=TrialState.INFEASIBLE, **ended))  # type: ignore[arg-type]
    stopped = start(store, store.runs()[0], 2)
    why = "the run was stopped in the middle of this trial"
    store.finish_trial(
        replace(stopped, state=TrialState.ABORTED, directory=str(folder), reason=why, cause="stopped")
    )
    (live := tmp_path / "0003-live-0").mkdir()
    (live / "engine.log").write_text("the engine of a trial that is not measured yet")
    launch = a_launch(a_study())
    store.add_launch(replace(launch, id="L0", ended_at=launch.started_at, directory=str(folder)))
    at = start(store, store.runs()[0], 3).started_at + timedelta(seconds=1)
    store.add_launch(replace(launch, started_at=at, directory=str(live)))
    store.close()
    assert call(tmp_path, "trial", "log", "chat", 3).stdout == f"{(live / 'engine.log').read_text()}\n"
    first, second, rule, *rest = call(tmp_path, "trial", "log", "chat", 1, "--lines", 2).stdout.splitlines()
    assert first == "no_kv_memory: no memory left for the KV cache (docs/troubleshooting.md#no_kv_memory)"
    assert second.startswith("root cause: (EngineCore pid=7) ValueError: No available memory")
    assert (rule, rest) == ("---", ENGINE_LOG.splitlines()[-2:])
    for words, said in (((1, "--attempt", 5), "trial 1 of study chat has no attempt 5, only 0"),
                        (("1.5",), "trial 1 of study chat has no attempt 5, only 0"),
                        (("3.1", "--attempt", 1), "'3.1' already names an attempt"),
                        (("x",), "'x' is no trial"),
                        ((7,), "study chat has no trial 7; its last trial is 3")):  # fmt: skip
        assert said in str(call(tmp_path, "trial", "log", "chat", *words).exception)
    assert call(tmp_path, "trial", "log", "chat", 2, "--lines", 1).stdout.splitlines()[:2] == [
        f"stopped: {why} (docs/troubleshooting.md#stopped)",
        "---",
    ]


def test_what_is_not_there_yet_is_said_in_a_word(tmp_path: Path) -> None:
    Store(f"sqlite:///{tmp_path / 'tuner.db'}").close()
    for words in (["study", "list"], ["run", "list"], ["profile", "list"], ["node", "list"]):
        assert call(tmp_path, *words).stdout == "nothing yet\n", words
    assert call(tmp_path, "history").stdout == "no run has measured goodput_rps yet\n"


def test_history_counts_the_runs_that_have_no_row(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study = a_study()
    for hour in range(3):
        run = a_run(store, study, now=NOW + timedelta(hours=hour))
        state = TrialState.COMPLETE if hour == 2 else TrialState.INFEASIBLE
        finished(store, start(store, run, hour), a_measurement(90.0), state=state)
        store.save_run(replace(run, state=RunState.FINISHED, ended_at=run.started_at))
    told = call(tmp_path, "history").stdout
    assert told.endswith(
        "2 ended runs without a complete trial in an engine of its own: see `tuner run list`\n"
    )
    assert "ended run" not in call(tmp_path, "history", "--since", f"{NOW:%Y}-12-31").stdout
    store.close()


def test_run_status_without_an_id_shows_the_newest_run(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    assert "there is no run yet" in str(call(tmp_path, "run", "status").exception)
    study = a_study()
    old = a_run(store, study)
    store.save_run(replace(old, state=RunState.FINISHED, ended_at=NOW))
    new = store.open_run(
        study.id, trials_limit=3, deadline=None, now=NOW + timedelta(hours=1), pid=1, host="host"
    )
    store.close()
    assert call(tmp_path, "run", "status").stdout.startswith(new.id)
    assert call(tmp_path, "run", "status", old.id).stdout.startswith(old.id)


def test_a_file_that_was_asked_for_is_written_whole_and_can_be_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("before")
    write_file(tmp_path / "old", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "after"
    with pytest.raises(Unavailable, match=r"cannot write .*none/x: No such file"):
        write_file(tmp_path / "none" / "x", "text")
    write_file(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    program = "umask 022; exec {} -m tuner init {} --model Qwen/Qwen2.5-7B-Instruct"
    made = tmp_path / "study.yaml"
    subprocess.run(
        ["sh", "-c", program.format(sys.executable, made)], env=environment(tmp_path / "home"), check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert made.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("kind", ["a demonstration", "a real run"])
def test_6_a_demonstration_s_verdict_says_so_beside_its_evidence(tmp_path: Path, kind: str) -> None:
    """`clear winner` stood beside `confirmed False`."""
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study, shown = a_study(), kind == "a demonstration"
    trial = finished(store, start(store, a_run(store, study), 1), a_measurement(90.0))
    evidence: dict[str, JSON] = {"verdict": "clear winner", "confirmed": not shown, "demonstration": shown}
    made = registry.publish(
        store, study=study, trial=trial, argv=(), env={"VLLM_CPU_KVCACHE_SPACE": "1", "A": "b"},
        evidence=evidence, now=NOW, alias=None,
    )  # fmt: skip
    store.close()
    said = call(tmp_path, "profile", "show", made.id).stdout
    assert ("clear winner (a demonstration)" in said) == shown
    assert "in the environment: A=b VLLM_CPU_KVCACHE_SPACE=1" in said


def test_6_a_printed_command_has_the_home_that_is_not_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TUNER_HOME", raising=False)
    monkeypatch.delenv("TUNER_DATABASE_URL", raising=False)
    assert runnable("tuner front chat", "bin/tuner") == "bin/tuner front chat"
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / ".local" / "share" / "tuner"))
    assert runnable("tuner front chat") == "tuner front chat"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNER_HOME", "my home")
    assert runnable("tuner front chat") == f"TUNER_HOME='{tmp_path}/my home' tuner front chat"
    monkeypatch.setenv("TUNER_DATABASE_URL", "postgresql://me:secret@db/tuner")
    assert "secret" not in runnable("tuner front chat")
    monkeypatch.setenv("TUNER_DATABASE_URL", "postgresql:///tuner?password=secret")
    assert "secret" not in runnable("tuner front chat")
    monkeypatch.setenv("TUNER_DATABASE_URL", "sqlite:////srv/my tuner.db")
    assert "' TUNER_DATABASE_URL='sqlite:////srv/my tuner.db' tuner front" in runnable("tuner front chat")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["my bin/tuner"])
    assert runnable("tuner front chat", program()).endswith(f" '{tmp_path}/my bin/tuner' front chat")


@pytest.mark.slow
def test_6_printed_commands_run_as_printed(tmp_path: Path) -> None:
    """Pasted into a shell that knows nothing of the home: the pull command, and those of the report."""
    home = tmp_path / "my home"
    done = tuner(home, "tune", write(tmp_path, VIRTUAL), "--trials", 3, "--all-trials")
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^pull the winner: (.*)$", done.stdout, re.MULTILINE)
    report = tuner(home, "report", "tiny", "--format", "md", "-o", "-").stdout
    printed += re.findall(r"^- pull the winner: `(.*)`$", report, re.MULTILINE)
    assert len(printed) == 2
    shown = re.findall(r"^ *(TUNER_HOME=.* tuner (?:front|study show) \w+)$", report, re.MULTILINE)
    assert len(shown) == 2
    bare = {n: v for n, v in os.environ.items() if not n.startswith("TUNER_")}
    bare["PATH"] = f"{Path(sys.executable).parent}:{bare['PATH']}"
    for line in (*printed, *shown):
        ran = subprocess.run(line, shell=True, env=bare, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, (line, ran.stderr)
        assert "max-num-seqs" in ran.stdout or line in shown, line


def test_the_status_of_a_run_that_only_confirms_says_so(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    store.save_run(replace(a_run(store, a_study()), trials_limit=0))
    store.close()
    shown = call(tmp_path, "run", "status").stdout
    assert ": no new trials\n" in shown
    assert "only the confirmation, no deadline" in shown


def test_of_several_studies_with_one_name_the_newest_is_shown_and_named(tmp_path: Path) -> None:
    """Issue 29, 39: `tuner run list` gave both one name, and nothing said which one was shown."""
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    old, new = a_study(), replace(a_study(), id="f" * 64, created_at=NOW + timedelta(days=1))
    for study in (old, new):
        a_run(store, study)
    assert store.study(old.name).id == new.id
    store.close()
    listed = call(tmp_path, "run", "list").stdout
    for study in (old, new):
        assert f"{study.name} ({study.id[:12]})" in listed
    said = f"2 studies have the name {old.name}. This is {new.id[:12]}, the newest"
    assert said in call(tmp_path, "front", old.name).stderr
    assert "studies have the name" not in call(tmp_path, "front", old.id[:12]).stderr


def test_a_version_is_told_with_the_id_that_commands_take(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    study, made = a_study(), []
    for node in ("n1", "n2"):
        mine = replace(study, id=node * 32, node=node)
        trial = finished(store, start(store, a_run(store, mine), 1), a_measurement(90.0))
        made.append(
            registry.publish(
                store, study=mine, trial=trial, argv=(), env={}, evidence={}, now=NOW, alias=None
            )
        )
    store.close()
    assert [(p.id, p.version) for p in made] == [(1, 1), (2, 1)]
    shown = call(tmp_path, "profile", "show", 2).stdout
    assert shown.startswith(f"profile 2: {study.model} on n2 for {study.workload}, version 1\n")
    assert "`tuner profile list` shows the ids" in str(call(tmp_path, "profile", "show", 3).exception)
    assert "not its version" in " ".join(call(tmp_path, "profile", "show", "--help").stdout.split())
