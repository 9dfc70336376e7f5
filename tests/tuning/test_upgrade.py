"""`tuner upgrade-check` on planted releases of the simulated engine: is it slower, why, and what to do."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.service.surfaces import plain
from tests.service.world import World
from tests.tuning.studies import tuner, write
from tests.tuning.test_compare import CALM, NOISE, store_of
from tuner.conclusions import (
    Arm,
    Conclusion,
    Difference,
    Judgement,
    LostKnob,
    MovedDefault,
    UpgradeFinding,
    Word,
)
from tuner.records import Candidate, EngineFacts
from tuner.report.board import board_of
from tuner.tuning.comparison import ArmConfiguration
from tuner.tuning.upgrade import finding_of, fitted, without_renamed

RELEASES = {
    "same": "version: 0.33.0\n",
    "slow": "version: 0.33.0\nslower: 1.2\n",
    "flip": "version: 0.33.0\ndefaults: {max-num-batched-tokens: 128}\n",
    "renamed": "version: 0.33.0\nrenamed: {max-num-seqs: max-running-seqs}\n",
}


def checked(folder: Path, release: str) -> tuple[UpgradeFinding, Conclusion]:
    """What a check of the study's own configuration finds."""
    write(folder, CALM)
    (folder / "new.yaml").write_text(RELEASES[release])
    words = ("upgrade-check", "study.yaml", "--to", "new.yaml", "--alias", "today", "--json")
    done = tuner(folder / "home", *words, cwd=folder, more=NOISE)
    assert done.returncode == 0, done.stderr
    assert "(engine defaults)" not in done.stderr, "every arm has at most 64 sequences"
    found = json.loads(done.stdout)
    assert set(found) == {"run", "conclusion"}
    store = store_of(folder)
    said = store.conclusion(found["run"]["id"])
    assert said is not None
    verdict = f"advice: {found['conclusion']['advice']}"
    assert found["run"]["summary"]["verdict"] == verdict, "never the word of a search"
    assert board_of(store, store.study(said.study_id)).found()["verdict"] == {
        "verdict": verdict, "sentence": said.sentence
    }  # fmt: skip
    return UpgradeFinding.from_json(found["run"]["summary"]["upgrade"]), said


def test_a_slower_release_is_told_and_the_code_is_the_cause(tmp_path: Path) -> None:
    found, said = checked(tmp_path, "slow")
    assert (found.advice, found.fault, found.compiles) == ("stay", "code", True)
    assert set(found.worse) & {"ttft_p50_ms", "tpot_p50_ms"}
    assert found.moved == ()
    assert said.sentence.startswith("Advice: stay. 0.33.0 is worse than 0.32.0 in")
    assert "The code is the cause: this configuration uses no default that has changed." in said.sentence
    is_open = any(c.word == "open" and (c.within or 1) >= 0.1 for c in said.finalists[0].changes)
    (run,) = store_of(tmp_path).runs(said.study_id)
    assert run.reason == (
        "another round cannot change the advice" if is_open else "every difference is known"
    )
    assert [arm.name for arm in said.finalists] == ["new version"]


def test_a_default_that_moved_is_named_and_pinned(tmp_path: Path) -> None:
    found, said = checked(tmp_path, "flip")
    assert (found.advice, found.fault) == ("move with these pins", "default")
    (moved,) = found.moved
    assert (moved.name, moved.after, moved.guilty) == ("max_num_batched_tokens", 128, True)
    assert f"max_num_batched_tokens={moved.before} (now 128)" in said.sentence
    assert said.finalists[1].candidate["max_num_batched_tokens"] == moved.before
    home = tmp_path / "home"
    listed = tuner(home, "run", "list").stdout
    assert "advice: move with these pins" in listed
    assert "baseline stays" not in listed, "a word of a search, which has no versions"
    assert "\nAdvice: move with these pins." in tuner(home, "run", "status", said.run_id).stdout
    shown = tuner(home, "trial", "show", said.study_id, 1).stdout
    (where,) = re.findall(r"^directory: (.*)$", shown, re.M)
    assert (Path(where) / "engine.log").is_file()
    plan = tuner(
        home, "upgrade-check", "study.yaml", "--to", "new.yaml", "--alias", "today", "--dry-run", cwd=tmp_path
    )
    assert plan.stdout.endswith("the run also launches the new version with their old values.\n")


def test_a_renamed_flag_is_told_with_its_successor_and_used(tmp_path: Path) -> None:
    found, said = checked(tmp_path, "renamed")
    assert not found.compiles
    (lost,) = found.lost
    assert (lost.name, lost.value, lost.successor) == ("max_num_seqs", 64, "--max-running-seqs")
    assert lost.why == "--max-num-seqs is now --max-running-seqs"
    assert (found.advice, found.fault) == ("move", "none")
    store = store_of(tmp_path)
    argv = [each.argv for each in store.launches(said.study_id)]
    assert any("--max-running-seqs" in words for words in argv)
    assert all("--max-num-seqs" in words or "--max-running-seqs" in words for words in argv)
    assert_ran_with(tmp_path, said, "--max-running-seqs")


def assert_ran_with(folder: Path, said: Conclusion, flag: str) -> None:
    """Every surface with a configuration shows what the new version was really given."""
    home, ref = folder / "home", said.study_id
    texts: dict[object, str] = {
        words: tuner(home, *words).stdout
        for words in (
            ("front", ref),
            ("study", "show", ref),
            ("trial", "show", ref, 1),
            ("report", ref, "-o", "-"),
            ("report", ref, "--format", "md", "-o", "-"),
        )
    }
    world = World(home)
    client = TestClient(world.app, base_url="http://localhost")
    pages = (f"/studies/{ref}/trials/1", f"/studies/{ref}/trials", f"/compare?study={ref}&trial=0&trial=1")
    texts |= {page: client.get(page).text for page in pages}
    world.store.close()
    for words, text in texts.items():
        told = plain(text)
        assert re.search(rf"{flag}\W+64\b", told), (words, told)
        assert "(engine defaults)" not in told, words


def test_a_flag_of_another_name_is_no_change_where_the_engine_does_not_report_it() -> None:
    renamed = LostKnob(name="max_num_seqs", value=64, successor="--max-running-seqs", why="it is renamed")
    gone = LostKnob(name="watermark", value=0.1, successor=None, why="it is gone")
    differs = {"max_num_seqs": (64, None), "watermark": (0.1, None)}
    arm = without_renamed(Arm(trial=1, candidate=Candidate(), changed=differs), (renamed, gone))
    assert arm.changed == {"watermark": (0.1, None)}


def test_the_old_history_is_not_touched_and_one_engine_is_no_upgrade(tmp_path: Path) -> None:
    write(tmp_path, CALM)
    (tmp_path / "new.yaml").write_text("{}\n")
    words = ("upgrade-check", "study.yaml", "--to", "new.yaml", "--from", "new.yaml", "--alias", "today")
    done = tuner(tmp_path / "home", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "the same engine" in done.stderr
    done = tuner(tmp_path / "home", *words[:4], cwd=tmp_path)
    assert done.returncode in (2, 4)


def difference(metric: str, change: float, word: Word) -> Difference:
    return Difference(metric=metric, before=100.0, after=100.0 * (1 + change), change=change,
                      low=change - 0.02, high=change + 0.02, within=abs(change) + 0.02, word=word,
                      repeats=3)  # fmt: skip


def concluded(*changes: float | None) -> Conclusion:
    """Arms with these changes of one latency; None: it did not serve."""
    arms = [
        Arm(trial=n, candidate=Candidate(), name=f"arm {n}", dropped="out of memory" if c is None else None,
            changes=() if c is None else (difference("tpot_p50_ms", c, "worse" if c > 0.05 else "open"),),
            confirmed={"tpot_p50_ms": 1.0})
        for n, c in enumerate(changes, start=1)
    ]  # fmt: skip

    return Conclusion(
        run_id="r", study_id="s", at=datetime(2026, 1, 1, tzinfo=UTC), outcome=Judgement.BASELINE_STAYS,
        sentence="", baseline=Arm(trial=0, candidate=Candidate(), name="old"), finalists=tuple(arms),
        repeats=3,
    )  # fmt: skip


MOVED = (MovedDefault(name="a", before=1, after=2), MovedDefault(name="b", before=True, after=False))
KNOWN = UpgradeFinding(old="1", new="2", configuration="today", compiles=True, moved=MOVED)


@pytest.mark.parametrize(
    ("changes", "cause", "advice", "guilty"),
    [
        ((0.20, 0.19, 0.2, 0.2), "code", "stay", []),
        ((0.20, 0.01, 0.01, 0.2), "default", "move with these pins", ["a"]),
        ((0.20, 0.01, 0.2, 0.0), "default", "move with these pins", ["b"]),
        ((0.30, 0.10, 0.1, 0.3), "both", "move with these pins", ["a"]),
        ((0.01, 0.0, 0.0, 0.0), "none", "move", []),
        ((None, 0.01, 0.01, None), "default", "move with these pins", ["a"]),
        ((None, None, None, None), "start", "stay", []),
    ],
)
def test_the_cause_is_what_the_pinned_arms_undo(
    changes: tuple[float | None, ...], cause: str, advice: str, guilty: list[str]
) -> None:
    found = finding_of(KNOWN, concluded(*changes), [("a", "b"), ("a",), ("b",)], 0.1)
    assert (found.fault, found.advice) == (cause, advice)
    assert [m.name for m in found.moved if m.guilty] == guilty


def facts(version: str, *flags: str) -> EngineFacts:
    return EngineFacts(kind="vllm", version=version, platform="cuda", flags=frozenset(flags))


def test_what_the_new_version_does_not_take_is_renamed_or_left_out() -> None:
    old = facts("0.31.0", "--max-num-seqs", "--some-old-thing", "--dtype")
    new = facts("0.32.0", "--max-running-seqs", "--dtype")
    asked = ArmConfiguration(candidate=Candidate({"max_num_seqs": 8}), args={"some-old-thing": True}, env={})
    made, lost = fitted(asked, {"dtype": "float32"}, old, new)
    assert made.candidate == Candidate()
    assert made.args == {"dtype": "float32", "max-running-seqs": 8}
    assert [(k.name, k.successor) for k in lost] == [
        ("max_num_seqs", "--max-running-seqs"), ("some-old-thing", None),
    ]  # fmt: skip
