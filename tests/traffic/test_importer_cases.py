"""The ruler's cases that concern importers (docs/cases.md R12 to R16), on every format that can have them."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.traffic.formats import FORMATS, MOONCAKE, UNITS
from tests.traffic.test_importers import conserved, put, quality
from tuner.replay.feeder import Prompts, salt
from tuner.traffic.importers import read_any
from tuner.traffic.trace import STATUSES, Trace

VOCABULARY = 5000
IDS: dict[str, dict[str, object]] = {
    "mooncake": {"timestamp": 9000, "output_length": 1},
    "aiperf": {"session_id": "z", "timestamp": 9000, "output_length": 1},
    "bailian": {"chat_id": 900, "parent_chat_id": -1, "timestamp": 99, "output_length": 1, "turn": 1},
}


def taken(directory: Path, name: str, dequantise: bool = True) -> Trace:
    return read_any(put(directory, FORMATS[name][0]), unit=UNITS.get(name), dequantise=dequantise)


@pytest.mark.parametrize("name", FORMATS)
def test_case_r12_stamps_are_rebased_and_rows_are_sorted(tmp_path: Path, name: str) -> None:
    trace = taken(tmp_path, name)
    assert trace.arrival_s[0] == 0
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert trace.duration_s < 300, "no stamp of today is slept for"
    assert conserved(trace)


@pytest.mark.parametrize("name", FORMATS)
def test_case_r12_rows_without_ids_share_no_token_run(tmp_path: Path, name: str) -> None:
    trace = taken(tmp_path, name)
    prompts = Prompts(trace, VOCABULARY, salt(0, 1, 0))
    alone = [row for row in range(len(trace)) if not len(trace.row_blocks(row)) and trace.input_len[row] >= 9]
    starts = {tuple(prompts.tokens(row)[:9].tolist()) for row in alone}
    assert len(starts) == len(alone)


@pytest.mark.parametrize("name", FORMATS)
def test_case_r13_every_prompt_has_the_length_that_was_read(tmp_path: Path, name: str) -> None:
    trace = taken(tmp_path, name)
    prompts = Prompts(trace, VOCABULARY, salt(0, 1, 0))
    assert len(trace)
    for row in range(len(trace)):
        assert len(prompts.tokens(row)) == trace.input_len[row] > 0
        assert len(json.loads(prompts.token_json(row))) == trace.input_len[row]


@pytest.mark.parametrize("name", ["burstgpt-1", "litellm", "otlp", "capture"])
def test_case_r14_answers_that_failed_are_kept_and_flagged(tmp_path: Path, name: str) -> None:
    trace = taken(tmp_path, name)
    bad = [STATUSES[code] for code in trace.status if STATUSES[code] != "ok"]
    assert bad
    assert quality(trace).get("not_ok_kept", 0) + quality(trace).get("no_output_flagged", 0) >= len(bad)


@pytest.mark.parametrize("name", IDS)
def test_case_r15_ids_that_contradict_the_length_are_counted(tmp_path: Path, name: str) -> None:
    size = 16 if name == "bailian" else 512
    beyond = IDS[name] | {"input_length": size, "hash_ids": [901, 902, 903]}
    short = IDS[name] | {"input_length": 9 * size, "hash_ids": [911], "chat_id": 901}
    text = "\n".join([FORMATS[name][0], json.dumps(beyond), json.dumps(short)])
    trace = read_any(put(tmp_path, text), unit=UNITS[name])
    assert quality(trace)["blocks_beyond_length_cut"] == 1
    assert quality(trace)["blocks_short_of_length"] >= 1
    assert conserved(trace)


def test_case_r15_an_id_that_is_a_part_here_and_whole_there_is_counted(tmp_path: Path) -> None:
    assert quality(read_any(put(tmp_path, MOONCAKE), unit="ms"))["blocks_partial_and_whole"] == 1


@pytest.mark.parametrize(
    ("name", "arrivals"),
    [
        ("azure", [0.0, 4.314579, 4.541877, 5.710403]),
        ("litellm", [0.0, 2.875]),
        ("otlp", [0.0, 2.000000014, 4.000000028]),
        ("openai", [0.0, 1.5]),
        ("tracelab", [0.0, 60.0, 120.0]),
        ("capture", [0.0, 0.004, 0.005]),
        ("generic", [0.0, 0.0019, 0.1028]),
    ],
)
def test_case_r16_fractions_are_kept_to_the_last_digit(
    tmp_path: Path, name: str, arrivals: list[float]
) -> None:
    trace = taken(tmp_path, name)
    assert trace.arrival_s.tolist() == pytest.approx(arrivals, abs=2e-9)
    assert "arrivals_spread" not in quality(trace)


@pytest.mark.parametrize("name", ["burstgpt-1", "burstgpt-3", "vllm-log"])
def test_case_r16_whole_seconds_are_found_and_spread_within_them(tmp_path: Path, name: str) -> None:
    raw, trace = taken(tmp_path, name, dequantise=False), taken(tmp_path, name)
    assert (raw.arrival_s % 1 == 0).all()
    assert trace.meta["spread_s"] == 1.0
    assert quality(trace)["arrivals_spread"] == len(trace)
    shift = trace.arrival_s - raw.arrival_s
    assert shift.max() - shift.min() <= 1.0
