"""`tuner demo --python PY --trace TRACE`: a study of one's own traffic for a CPU, as docs/how-to says."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.tuning.studies import tuner
from tuner.commands.tune import REQUESTS, REQUESTS_S, TOKENS_S, pace
from tuner.traffic.trace import build

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "try-on-cpu.md").read_text()


def gateway(folder: Path, requests: int, gap_s: float, longest: int = 3000) -> None:
    rows = (f"{n * gap_s:.3f},{100 + n * 97 % (longest - 100)},{20 + n % 280}\n" for n in range(requests))
    (folder / "gateway.csv").write_text("ts,prompt_tokens,answer_tokens\n" + "".join(rows))


def typed(begin: str) -> list[str]:
    """The words of the page's line that begins so, without `tuner`."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(begin)]
    return line.split()[1:]


def written(home: Path, cwd: Path) -> tuple[Path, str]:
    """Type the page's lines with an interpreter that is not there: (the study file, what was said)."""
    imported = tuner(home, *typed("tuner trace import gateway.csv"), cwd=cwd)
    assert imported.returncode == 0, imported.stderr
    words = typed("tuner demo --python ~/vllm-cpu/bin/python --trace")
    done = tuner(home, *(w.replace("~", str(home / "nowhere")) for w in words), cwd=cwd)
    assert done.returncode == 2
    assert "there is no interpreter at" in done.stderr
    return home / "demo-cpu" / "own-traffic.yaml", done.stderr


@pytest.mark.slow
def test_the_own_trace_is_a_study_with_enough_requests_whose_path_is_said_first(tmp_path: Path) -> None:
    gateway(tmp_path, 900, 0.2, longest=9000)
    study, said = written(tmp_path, tmp_path)
    assert f"the study file is {study}" in said
    assert re.search(r"left out: \d+ of 900 requests, longer than the model's 8192 tokens", said)
    file = yaml.safe_load(study.read_text())
    assert (file["plan"]["base"], file["slices"], file["budget"]) == ("brief", "auto", {"trials": 4})
    file["engine"] = {"kind": "simulated", "clock": "virtual", "args": {"max-model-len": 8192}}
    study.write_text(yaml.safe_dump(file))
    shown = tuner(tmp_path, "tune", study, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "WARNING" not in shown.stderr
    assert "may leave no launches" not in shown.stdout
    (requests,) = re.findall(r"^peak +\S+ +\S+ +(\d+) ", shown.stdout, re.MULTILINE)
    assert int(requests) >= REQUESTS // 2
    done = tuner(tmp_path, "tune", study)
    assert done.returncode == 0, done.stderr
    assert "emonstration" not in done.stdout + done.stderr


@pytest.mark.parametrize(("gap_s", "tokens"), [(0.001, 300), (0.2, 1500), (60.0, 50), (3.0, 8000)])
def test_a_cpu_keeps_up_and_a_slice_holds_enough(gap_s: float, tokens: int) -> None:
    count = 2000
    trace = build({"arrival_s": np.arange(count) * gap_s, "input_len": np.full(count, tokens - 20),
                   "output_len": np.full(count, 20)})  # fmt: skip
    speed, slice_s = pace(trace)
    rate = speed / gap_s
    assert rate <= REQUESTS_S * 1.05
    assert rate * tokens <= TOKENS_S * 1.05
    assert rate * 10 * slice_s >= REQUESTS * 0.9


def test_a_trace_that_cannot_be_tuned_so_is_refused_before_anything_runs(tmp_path: Path) -> None:
    gateway(tmp_path, 30, 1.0)
    alone = tuner(tmp_path, "demo", "--trace", "gateway.csv", cwd=tmp_path)
    assert (alone.returncode, "--trace needs --python PY" in alone.stderr) == (2, True)
    rows = "".join(f"{n},9000,20\n" for n in range(30))
    (tmp_path / "long.csv").write_text("arrival_s,input_len,output_len\n" + rows)
    long = tuner(tmp_path, "demo", "--python", "python", "--trace", "long.csv", cwd=tmp_path)
    assert (long.returncode, "every request of the trace has more than" in long.stderr) == (2, True)
