"""The measured table (benchmarks/table): its harness on the simulated engine, and the shipped files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.table.load import outcomes, rows
from benchmarks.table.measure import read_plan
from tuner.errors import BadInput

HERE = Path(__file__).parents[1] / "benchmarks" / "table"
PLAN = """\
table: made
model: {model}
traffic: traffic.csv
requests: 12
speed: 4
slo: {{ttft_ms: 500, tpot_ms: 50, attainment: 0.95}}
args: [--max-model-len, "16384"]
env: {{TUNER_SIM_CARD: h200}}
launches:
  - knobs: {{}}
    screened: [{{max_num_seqs: 2, max_num_batched_tokens: 512}}, {{max_num_batched_tokens: 256}}]
  - knobs: {{max_num_seqs: 1024, max_num_batched_tokens: 512}}
  - knobs: {{gpu_memory_utilization: 0.11}}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    lines = [f"{n * 0.2},{200 + 90 * n},{5 + n}\n" for n in range(12)]
    (tmp_path / "traffic.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(lines))
    made = tmp_path / "plan.yaml"
    made.write_text(PLAN.format(model=HERE.parent / "h100" / "qwen2.5-7b-shape"))
    return made


def start(*words: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks.table.measure", *map(str, words), "--isolated"]
    return subprocess.Popen(command, cwd=HERE.parents[1], stdout=subprocess.DEVNULL, start_new_session=True)


def measured(out: Path) -> list[Path]:
    return sorted((out / "rows").glob("*.parquet"))


@pytest.mark.slow
def test_a_table_is_measured_cut_and_gone_on_with(plan: Path, tmp_path: Path) -> None:
    """Killed after the first row, the harness keeps it as it was and measures what is missing."""
    out, files = tmp_path / "out", tmp_path / "files"
    first = start(plan, out)
    end = time.monotonic() + 120
    while not measured(out) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    (kept,) = measured(out)
    before = kept.read_bytes()
    assert start(plan, out).wait(240) == 0
    assert kept.read_bytes() == before
    assert start(plan, out, "--gather", files / "made").wait(60) == 0
    found = {json.dumps(row["knobs"], sort_keys=True): row for row in rows("made", files)}
    own, screened, idle, refused, crashed = (
        found[key]
        for key in (
            "{}",
            '{"max_num_batched_tokens": 512, "max_num_seqs": 2}',
            '{"max_num_batched_tokens": 256}',
            '{"max_num_batched_tokens": 512, "max_num_seqs": 1024}',
            '{"gpu_memory_utilization": 0.11}',
        )
    )
    assert len(found) == 5
    assert (own["state"], own["how"], own["card"]) == ("COMPLETE", "relaunched", "simulated")
    assert (screened["state"], screened["how"]) == ("COMPLETE", "screened")
    assert screened["ttft_p95_ms"] > own["ttft_p95_ms"]
    assert screened["effective"]["max_num_seqs"] == 2
    assert (idle["state"], idle["cause"]) == ("REFUSED", "live_limits")
    assert "below max_num_seqs 1024" in idle["reason"]
    assert (refused["state"], refused["cause"]) == ("INFEASIBLE", "config_invalid")
    assert (crashed["state"], crashed["cause"]) == ("INFEASIBLE", "no_kv_memory")
    assert all(row["e2e_p95_ms"] is None for row in (idle, refused, crashed))
    requests = outcomes("made", own["key"], files)
    assert [r["row"] for r in requests] == list(range(12))
    e2e = sorted((r["last_token_s"] - r["scheduled_s"]) * 1000 for r in requests)
    assert own["e2e_p50_ms"] == pytest.approx((e2e[5] + e2e[6]) / 2)
    assert outcomes("made", refused["key"], files) == []
    again = tmp_path / "again"
    assert start(plan, again, "--scatter", files / "made").wait(60) == 0
    assert {path.name for path in measured(again)} == {path.name for path in measured(out)}
    assert start(plan, again, "--gather", files / "same").wait(60) == 0
    assert rows("same", files) == rows("made", files)


def test_a_plan_with_a_word_that_none_has_is_refused(plan: Path) -> None:
    plan.write_text(plan.read_text().replace("speed: 4", "sped: 4"))
    with pytest.raises(BadInput, match="unknown key 'sped'"):
        read_plan(plan)


@pytest.mark.parametrize("path", sorted(HERE.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_plan_can_be_read_and_names_every_row_once(path: Path) -> None:
    plan = read_plan(path)
    keys = [asked.key for group in plan.groups for asked in group]
    assert len(keys) == len(set(keys)) >= (5 if "two-cards" in path.stem else 40)
    assert sum(key.startswith("relaunched") for key in keys) >= (2 if "two-cards" in path.stem else 12)


@pytest.mark.parametrize("path", sorted(HERE.glob("*/rows.parquet")), ids=lambda path: path.parent.name)
def test_a_shipped_table_holds_together(path: Path) -> None:
    """Each measured row has its requests, and its percentiles are theirs."""
    table = pq.read_table(path.with_name("outcomes.parquet"))
    by_key: dict[str, list[float]] = {}
    for request in table.to_pylist():
        last = request["last_token_s"] if request["error"] is None else None
        e2e = float("inf") if last is None else (last - request["scheduled_s"]) * 1000
        by_key.setdefault(request["key"], []).append(e2e)
    for row in rows(path.parent.name):
        assert (row["state"] == "COMPLETE") == (row["key"] in by_key)
        if row["state"] == "COMPLETE":
            ordered = sorted(by_key[row["key"]])
            place = 0.5 * (len(ordered) - 1)
            low, high = ordered[int(place)], ordered[int(place) + (place % 1 > 0)]
            assert row["e2e_p50_ms"] == pytest.approx((low + high) / 2, rel=1e-6)


def test_searches_are_compared_on_the_measured_tables(tmp_path: Path) -> None:
    """Random search goes through all the rows of a table, so it finds the best of them, for no more than the
    rows and launches took. A table whose baseline covers too much of the best volume is named.
    """
    command = [sys.executable, "benchmarks/search.py", "--cache", str(tmp_path), "real", "--seeds", "2"]
    words = ["--methods", "random", "two-knob grid", "--rows", str(tmp_path / "studies.jsonl")]
    done = subprocess.run([*command, *words], cwd=HERE.parents[1], capture_output=True, text=True, check=True)
    studies = [json.loads(line) for line in (tmp_path / "studies.jsonl").read_text().splitlines()]
    assert "left out: h200-7b: the default alone covers" in done.stdout
    assert {study["scenario"] for study in studies} == {"h200-32b"}
    for study in studies:
        assert study["spent"] <= sum(
            (row["seconds"] or 0) + (row["ready_s"] or 0) for row in rows("h200-32b")
        )
        assert study["method"] != "random" or study["hv90"] is not None
