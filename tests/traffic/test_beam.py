"""A beam search is a property of its row, from any source to the study that refuses it; it is never lost."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.traffic.conftest import make
from tests.traffic.formats import OPENAI, VLLM_LOG
from tests.traffic.test_capture import bench, body
from tests.traffic.test_importers import put, quality
from tests.traffic.upstream import post
from tests.tuning.studies import STUDY, TRACE, tuner, write
from tuner.errors import BadInput
from tuner.traffic import structure
from tuner.traffic import trace as traces
from tuner.traffic.importers import read_any
from tuner.traffic.statistics import describe
from tuner.traffic.trace import Trace, bundled

PARAMS = "params: SamplingParams(n=1, temperature=0.0, max_tokens=5, min_tokens=0)"


def asked(**more: object) -> str:
    first, *rest = OPENAI.splitlines()
    document = json.loads(first)
    document["request"] |= more
    return "\n".join([json.dumps(document), *rest])


@pytest.mark.parametrize(
    ("text", "n", "beam"),
    [
        (asked(use_beam_search=True, n=4), 4, 4),
        (asked(use_beam_search=True), 1, 1),
        (asked(use_beam_search=False, n=4), 4, 0),
        (VLLM_LOG.replace(PARAMS, "params: BeamSearchParams(beam_width=3, max_tokens=5)", 1), 3, 3),
        ("arrival_s,input_len,output_len,n,beam_width\n0,5,5,2,2\n1,5,5,1,\n", 2, 2),
    ],
)
def test_a_beam_search_is_imported_as_one(tmp_path: Path, text: str, n: int, beam: int) -> None:
    trace = read_any(put(tmp_path, text))
    assert (trace.n[0], trace.beam[0]) == (n, beam)
    assert not trace.beam[1:].any()
    assert quality(trace).get("beam_search", 0) == (beam > 0)


def test_a_beam_search_is_captured_as_one(tmp_path: Path) -> None:
    async def go() -> Trace:
        async with bench(tmp_path) as b:
            await post(b.port, body(n=4, use_beam_search=True))
            await post(b.port, body(n=4))
            return b.trace()

    assert asyncio.run(go()).beam.tolist() == [4, 0]


def test_traces_of_before_keep_their_digest_and_beams_go_round(tmp_path: Path) -> None:
    plain = make([9, 9], columns={"n": [4, 1]})
    beams = plain.changed(beam=np.array([4, 0], np.int16))
    assert plain.digest != beams.digest
    traces.write(beams, tmp_path / "t.parquet")
    assert traces.read(tmp_path / "t.parquet").beam.tolist() == [4, 0]
    assert not bundled().beam.any()  # was written before there was the column; read checks its digest


def test_beams_become_samples_or_go_when_that_is_asked_for() -> None:
    trace = make([9, 9, 9], columns={"n": [1, 2, 1], "beam": [4, 2, 0]})
    sampled, left = structure.without_beams(trace, "sample"), structure.without_beams(trace, "drop")
    assert (sampled.n.tolist(), sampled.beam.tolist()) == ([4, 2, 1], [0, 0, 0])
    assert left.beam.tolist() == [0]
    with pytest.raises(BadInput, match="expected sample or drop"):
        structure.without_beams(trace, "keep")
    assert describe(trace).beam_share == pytest.approx(2 / 3)


def test_a_study_of_beam_searches_is_refused_and_of_their_samples_is_not(tmp_path: Path) -> None:
    whole = read_any(TRACE)
    beam = np.zeros(len(whole), np.int16)
    beam[(whole.arrival_s > 20) & (whole.arrival_s < 20.5)] = 2
    traces.write(whole.changed(beam=beam), tmp_path / "beams.parquet")
    study = write(tmp_path, STUDY.replace(str(TRACE), "beams.parquet"))
    refused = tuner(tmp_path / "home", "tune", study, "--dry-run")
    assert refused.returncode == 2
    assert "beam searches. vLLM does not stream them" in refused.stderr
    done = tuner(tmp_path / "home", "trace", "reshape", tmp_path / "beams.parquet", "--beam", "sample", "-o",
                 tmp_path / "beams.parquet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert tuner(tmp_path / "home", "tune", study, "--dry-run").returncode == 0
