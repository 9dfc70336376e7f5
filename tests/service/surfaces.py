"""Every place where a run's conclusion is shown, and that all show the same."""

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from tests.commands.test_care import call
from tests.service.world import World
from tuner.conclusions import Conclusion
from tuner.history.store import Store
from tuner.records import Study
from tuner.report import words
from tuner.report.board import board_of


@dataclass(frozen=True)
class Shown:
    """What people read (by surface), and what programs do."""

    texts: Mapping[str, str]
    data: Mapping[str, Any]


def read(home: Path, study: Study, said: Conclusion) -> Shown:
    """All surfaces that show what one run of a study found."""
    texts, data = _commands(home, study, said)
    answers: dict[str, Any] = {}
    world = World(home)
    try:
        client = TestClient(world.app, base_url="http://localhost")
        for name, path in _pages(study, said).items():
            found = client.get(path)
            assert found.status_code == 200, (path, found.text)
            texts[f"page {name}"] = found.text
        for name, path in {
            "run": f"/v1/runs/{said.run_id}",
            "front": f"/v1/studies/{study.id}/front",
        }.items():
            answers[name] = client.get(path).json()
            data[f"api {name}"] = answers[name]["conclusion"]
        data["api nights"] = _nights(client, study)
        _assert_same_front(json.loads(_said(home, "front", study.id, "--json")), answers["front"])
    finally:
        world.store.close()
    return Shown(texts={name: plain(text) for name, text in texts.items()}, data=data)


def _assert_same_front(told: Mapping[str, Any], api: Mapping[str, Any]) -> None:
    """The command and the API give the same keys, and the same under each."""
    assert told.keys() == api.keys()
    for name in told.keys() - {"baseline", "front"}:
        assert told[name] == api[name], name
    for name in ("baseline", "front"):
        each, other = ([v] if isinstance(v, dict) else v or [] for v in (told[name], api[name]))
        assert [t["number"] for t in each] == [t["number"] for t in other], name


def _commands(home: Path, study: Study, said: Conclusion) -> tuple[dict[str, str], dict[str, Any]]:
    texts = {
        "front": _said(home, "front", study.id),
        "study show": _said(home, "study", "show", study.id),
        "run status": _said(home, "run", "status", said.run_id),
        "run list": _said(home, "run", "list"),
        "report": _said(home, "report", study.id, "-o", "-"),
        "markdown": _said(home, "report", study.id, "--format", "md", "-o", "-"),
        "history": "".join(_said(home, "history", "--metric", name) for name in study.objectives),
    }
    front = json.loads(_said(home, "front", study.id, "--json"))
    shown = json.loads(_said(home, "study", "show", study.id, "--json"))
    status = json.loads(_said(home, "run", "status", said.run_id, "--json"))
    data: dict[str, Any] = {
        "front": front["conclusion"], "run status": status["conclusion"], "study show": shown["conclusion"],
    }  # fmt: skip
    if (made := said.profiles.get("challenger")) is not None:
        texts["profile show"] = _said(home, "profile", "show", made.id)
        hook = home / "told.json"
        texts["webhook"] = json.loads(hook.read_text())["sentence"] if hook.is_file() else ""
    return texts, data


def _said(home: Path, *given: object) -> str:
    done = call(home, *given)
    assert done.exit_code == 0, (given, done.output)
    return done.stdout


def _pages(study: Study, said: Conclusion) -> dict[str, str]:
    found = {"study": f"/studies/{study.id}"}
    found |= {
        f"history {n}": f"/history?metric={n}&model={study.model}&node={study.node}" for n in study.objectives
    }
    if (made := said.profiles.get("challenger")) is not None:
        found["profile"] = f"/profiles/{made.id}"
    return found


def _nights(client: TestClient, study: Study) -> list[Any]:
    """The history's row of each run and objective."""
    found: list[Any] = []
    for name in study.objectives:
        asked = {"model": study.model, "metric": name, "node": study.node}
        for place in client.get("/v1/history", params=asked).json()["places"]:
            found += [*place["nights"], *place["other_runs"]]
    return found


def plain(text: str) -> str:
    """As it is read: without markup, escapes and line breaks."""
    bare = re.sub(r"<(style|script)>.*?</\1>", " ", text, flags=re.DOTALL)
    bare = html.unescape(re.sub(r"<[^>]*>", " ", bare) if "<main>" in text or "<h1>" in text else bare)
    return " ".join(re.sub(r"\\([\\`*_\[\]|#])", r"\1", bare).split())


WHOLE = ("front", "study show", "run status", "report", "markdown", "page study")
"""Surfaces that print the conclusion's headline."""


def assert_one_truth(home: Path, study: Study, said: Conclusion) -> None:
    """The same outcome, sentence, values and changes on every surface."""
    shown = read(home, study, said)
    for name, data in shown.data.items():
        if name != "api nights":
            assert data == said.to_json(), name
    head = plain(words.headline(said))
    for name in WHOLE:
        assert head in shown.texts[name], (name, head, shown.texts[name])
    shown_of_night = any(row["run_id"] == said.run_id for row in shown.data["api nights"])
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    sources = board_of(store, study).sources
    store.close()
    for name in (each for each in WHOLE if each != "run status"):
        assert sources in shown.texts[name], (name, sources)
    places = ["run list"]
    if said.winner is not None or _measured(home, study, said):
        places.append("history")
    if shown_of_night:  # else a better run of that night
        places.append(f"page history {study.objectives[0]}")
    for name in places:
        assert words.outcome(said) in shown.texts[name], (name, words.outcome(said), shown.texts[name])
    assert plain(words.cost(said.cost)) in shown.texts["run status"]
    assert plain(words.cost(said.cost)) in shown.texts["report"]
    if said.winner is not None:
        _assert_winner(shown, study, said)


def _measured(home: Path, study: Study, said: Conclusion) -> bool:
    """Whether a run has a number that a history of values could show."""
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    try:
        found = [row for name in study.objectives for row in store.bests(model=study.model, metric=name)]
        return any(row.run_id == said.run_id for row in found)
    finally:
        store.close()


def _assert_winner(shown: Shown, study: Study, said: Conclusion) -> None:
    arm = said.arm(said.winner)
    assert arm is not None
    rows = {row["metric"]: row for row in shown.data["api nights"] if row["run_id"] == said.run_id}
    served = said.baseline is not None and said.baseline.dropped is None
    for name in study.objectives:
        made = arm.change(name)
        if not served:  # there is nothing to compare with, and no surface tells a change
            assert made is None, name
            assert rows[name]["from_baseline"] is None, rows[name]
            assert rows[name]["number"] == said.winner
            continue
        assert made is not None
        row = rows.get(name)
        others = [r for r in shown.data["api nights"] if r["metric"] == name and r["run_id"] != said.run_id]
        assert row is not None or others, "the history has the best run of the night, this one or another"
        history = ["history", f"page history {name}"] if row is not None else []
        places = ["front", "run status", "report", "markdown", "page study", *history]
        places += ["profile show", "page profile", *(["webhook"] if shown.texts["webhook"] else [])]
        for place in places:
            assert words.change(made) in shown.texts[place], (place, words.change(made), shown.texts[place])
        for value in (made.before, made.after):
            for place in ("front", "study show", "report", "markdown", "page study", *history):
                assert words.number(value) in shown.texts[place], (place, value, shown.texts[place])
        if row is None:
            continue
        told = json.loads(json.dumps(said.to_json()))["finalists"]
        assert row["from_baseline"] in [c for a in told for c in a["changes"]], row
        assert (row["value"], row["baseline"], row["number"]) == (made.after, made.before, said.winner)
    if shown.texts["webhook"]:
        assert plain(words.headline(said)) in shown.texts["webhook"]
    assert f"Trial {arm.label} is the published winner" in shown.texts["front"]


def frozen(home: Path, said: Conclusion) -> dict[str, object]:
    """Everything that is told of one run, as programs read it."""
    store = Store(f"sqlite:///{home / 'tuner.db'}", create=False)
    try:
        study = store.study(said.study_id)
        rows = [b for name in study.objectives for b in store.bests(model=study.model, metric=name)]
        return {
            "run": json.loads(_said(home, "run", "status", said.run_id, "--json")),
            "text": _said(home, "run", "status", said.run_id),
            "nights": [row for row in rows if row.run_id == said.run_id],
            "conclusion": store.conclusion(said.run_id),
            "profiles": [store.profile(each.id) for each in said.profiles.values()],
        }
    finally:
        store.close()
