"""The workbench: what the address asks for is what is shown, compared and downloaded."""

import csv
import io
import json
import re
from dataclasses import replace
from datetime import timedelta

import pyarrow.parquet as pq
import pytest

from tests.browser import world as browser_world
from tests.history.records import a_run
from tests.service.test_pages import visitor
from tests.service.world import World
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.records import RunState
from tuner.report.board import board
from tuner.service.pages import bench
from tuner.service.pages.bench import Bench, BenchQuery
from tuner.service.pages.compare import CompareQuery, compare


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A night of ten trials: eight measured, one out of memory, one without a port."""
    home = tmp_path_factory.mktemp("bench")
    there = browser_world.fill(home)
    store = there.store
    found = bench.bench_of(
        board(there.study, store.trials(there.study.id), store.conclusions(there.study.id))
    )
    store.close()
    return found


def numbers(held: Bench, **asked: object) -> list[int]:
    return [held.rows[place].number for place in held.ordered(BenchQuery(**asked))]  # type: ignore[arg-type]


def test_I27_2_sorts_by_any_column_with_missing_values_last(held: Bench) -> None:
    by = numbers(held, sort="ttft_p95_ms")
    values = [held.rows[n].measurement for n in by]
    known = [m.values["ttft_p95_ms"] for m in values if m is not None]
    assert known == sorted(known)
    assert values[len(known) :] == [None] * (len(values) - len(known))
    down = numbers(held, sort="-ttft_p95_ms")
    assert [held.rows[n].measurement is None for n in down[-6:]] == [True] * 6
    assert numbers(held)[0] == max(t.number for t in held.rows), "the newest first"


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("state=COMPLETE", lambda t: t.state.value == "COMPLETE"),
        ("state!=COMPLETE", lambda t: t.state.value != "COMPLETE"),
        ("max_num_seqs>=64", lambda t: t.candidate.get("max_num_seqs", 0) >= 64),
        ("knob.max_num_seqs=64", lambda t: t.candidate.get("max_num_seqs") == 64),
        ("ttft_p95_ms<200 tpot_p95_ms<20", lambda t: t.measurement is not None
         and t.measurement.values["ttft_p95_ms"] < 200 and t.measurement.values["tpot_p95_ms"] < 20),
        ("oom", lambda t: t.cause == "oom"),
        ("reason~MEMORY", lambda t: "memory" in (t.reason or "")),
        ("", lambda t: True),
    ],
)  # fmt: skip
def test_I27_2_filters_by_terms(held: Bench, where: str, holds: "object") -> None:
    assert callable(holds)
    wanted = {t.number for t in held.rows if holds(t)}
    assert set(numbers(held, where=where)) == wanted
    assert wanted


def test_I27_2_unknown_columns_and_numbers_are_named(held: Bench) -> None:
    with pytest.raises(BadInput, match="did you mean 'max_num_seqs'"):
        numbers(held, where="max_num_seq=3")
    with pytest.raises(BadInput, match="a number is expected"):
        numbers(held, where="ttft_p95_ms<fast")
    with pytest.raises(BadInput, match="no column"):
        numbers(held, sort="nothing")


def test_I27_2_the_address_holds_the_whole_state() -> None:
    asked = BenchQuery(where="a=1", sort="x", columns=("b", "c"), x="p", y="q", page=2, picked=(3, 4))
    assert asked.address() == "?where=a%3D1&x=p&y=q&sort=x&col=b&col=c&pick=3&pick=4&page=2"
    assert BenchQuery().address() == "?"


def test_I27_2_the_front_has_slo_labels_and_noise_and_the_rest_is_faint(held: Bench) -> None:
    seen = bench.view(
        held, BenchQuery(where="max_num_seqs>=64", x="ttft_p95_ms", y="goodput_rps"), lambda t: "/t"
    )
    assert 'class="slo"' in seen.front
    assert ">today<" in seen.front
    assert 'class="dots faint"' in seen.front
    assert 'class="dots chosen"' in seen.front
    assert seen.front.count("data-brush") == 1
    assert seen.front.count('tabindex="0"') == 1, "one stop of the keyboard"
    assert seen.lines.count('<rect class="axis"') >= 4


def test_I27_2_downloads_hold_the_chosen_rows_in_their_order(held: Bench) -> None:
    asked = BenchQuery(where="state=COMPLETE", sort="ttft_p95_ms")
    wanted = numbers(held, where="state=COMPLETE", sort="ttft_p95_ms")
    as_csv, media = bench.download(held, asked, "csv")
    rows = list(csv.DictReader(io.StringIO(as_csv.decode())))
    assert ([int(row["number"]) for row in rows], media) == (wanted, "text/csv")
    assert (
        pq.read_table(io.BytesIO(bench.download(held, asked, "parquet")[0]))["number"].to_pylist() == wanted
    )
    assert [row["number"] for row in json.loads(bench.download(held, asked, "json")[0])] == wanted
    with pytest.raises(BadInput, match="did you mean 'csv'"):
        bench.download(held, asked, "cvs")


def test_I27_2_two_to_five_are_compared(filled: World) -> None:
    client, _ = visitor(filled, "read")
    shown = client.get("/compare?study=chat&trial=0&trial=2").text
    assert "max_num_seqs" in shown.replace("<wbr>", "")
    assert shown.count('class="objective"') == 2
    for path, said in {
        "/compare?study=chat&trial=1": "2 to 5", "/compare?study=chat&trial=1&trial=99": "no trial 99",
        "/compare?node=n1&node=none": "no run on node", "/compare": "2 to 5",
        "/compare?" + "&".join(["study=chat"] + ["trial=1"] * 6): "2 to 5",
    }.items():  # fmt: skip
        answer = client.get(path)
        assert answer.status_code in (400, 404), path
        assert said in answer.text, path
    for path in (
        "/compare?profile=1&profile=2",
        f"/compare?run={_run(filled.store)}&run={_run(filled.store)}",
    ):
        assert client.get(path).status_code == 200, path


def test_B10_confirmed_numbers_and_those_of_the_search_share_no_row(filled: World) -> None:
    """Goodput by the repeats stood beside the search's share within the SLO, in one column."""
    client, _ = visitor(filled, "read")
    for path in ("/compare?study=chat&trial=1&trial=2", f"/compare?run={_run(filled.store)}&node=n1"):
        shown = client.get(path).text
        parts = shown.partition("Confirmed numbers</h2>")[2].partition("First measurements</h2>")
        confirmed, search = (re.sub(r"<[^>]*>", " ", part).split() for part in parts[::2])
        assert "90" in confirmed, path
        assert "0.97" in confirmed, "the share of good requests is of the same repeats"
        assert {"90", "3.5"} <= {*search}, "what the search measured"
        assert "3.5" not in confirmed, "a number of the search among the confirmed ones"


def test_B10_a_night_is_compared_by_its_own_repeats(filled: World) -> None:
    store = filled.store
    study = store.study("chat")
    first = store.conclusions(study.id)[0]
    later = a_run(store, study, now=filled.clock())
    arm = first.finalists[0]
    again = replace(first, run_id=later.id, at=later.started_at + timedelta(hours=1),
                    finalists=(replace(arm, confirmed={"ttft_p95_ms": 71.5}),))  # fmt: skip
    store.save_run(replace(later, state=RunState.FINISHED, ended_at=again.at), again)
    sides = compare(store, CompareQuery(runs=(first.run_id, later.id))).sides
    assert [side.confirmed["ttft_p95_ms"] for side in sides] == [90.0, 71.5]
    assert [side.values["ttft_p95_ms"] for side in sides] == [90.0, 90.0], "the search measured it once"


def _run(store: Store) -> str:
    return store.conclusions(store.study("chat").id)[0].run_id


def test_I27_2_old_addresses_of_the_table_lead_to_the_workbench(filled: World) -> None:
    client, _ = visitor(filled, "read")
    moved = client.get("/studies/chat?page=2")
    assert moved.status_code == 303
    assert re.search(r"/trials\?page=2$", moved.headers["location"])
    shown = client.get("/studies/chat/trials?where=state%3DCOMPLETE&sort=ttft_p95_ms").text
    assert 'aria-sort="ascending"' in shown
    assert "Download them" in shown
    assert client.get("/studies/chat/trials?where=nothing%3D3").status_code == 400
