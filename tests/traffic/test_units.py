"""The unit of times: told by evidence that leaves one, else asked for; never guessed."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.traffic.formats import FORMATS
from tests.traffic.test_importers import put
from tuner.errors import BadInput
from tuner.traffic.importers import importers, read_any

CASES = Path(__file__).parents[1] / "data" / "cases"


def lines(*rows: Mapping[str, object]) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def mooncake(stamps: Sequence[float], size: int = 256) -> str:
    return lines(*({"timestamp": at, "input_length": size, "output_length": 64} for at in stamps))


def bailian(stamps: Sequence[float]) -> str:
    return lines(
        *(
            {"chat_id": row, "parent_chat_id": row - 1, "timestamp": at}
            | {"input_length": 64, "output_length": 100, "turn": row + 1}
            for row, at in enumerate(stamps)
        )
    )


def burstgpt(stamps: Sequence[float], took: float | None = None) -> str:
    more = ("Session ID,Elapsed time,", f"s,{took},") if took is not None else ("", "")
    rows = (f"{at},{more[1]}ChatGPT,472,18,490,Conversation log" for at in stamps)
    return "\n".join(
        [f"Timestamp,{more[0]}Model,Request tokens,Response tokens,Total tokens,Log Type", *rows]
    )


def test_the_case_in_seconds_is_asked_for_with_what_each_unit_would_mean() -> None:
    with pytest.raises(BadInput) as refused:
        read_any(CASES / "seconds.jsonl")
    said = str(refused.value)
    assert "the file does not say the unit of 'timestamp'" in said
    assert "in s it is 60 s of 0.0833 requests/s; in ms it is 0.06 s of 83.3 requests/s" in said
    assert "--unit s|ms" in said
    assert read_any(CASES / "seconds.jsonl", unit="s").duration_s == pytest.approx(60, abs=1)
    assert read_any(CASES / "seconds.jsonl", unit="ms").duration_s == pytest.approx(0.06)


@pytest.mark.parametrize(
    "text",
    [
        mooncake([0, 1, 2, 60]),
        mooncake([0, 500, 1250, 60_000]),
        mooncake([float(at) / 7 for at in range(40)]),
        mooncake([3600 * at for at in range(20)]),
        burstgpt([5, 45, 118]),
        burstgpt([5000, 45_000, 118_000]),
        bailian([0, 700_000.5, 1_500_000.25, 2_300_000]),
        lines({"session_id": "a", "timestamp": 0, "input_length": 9, "output_length": 9})
        + lines({"session_id": "a", "delay": 1.5, "input_length": 19, "output_length": 9}),
        "timestamp,input_tokens,output_tokens\n0.0,5,5\n1.5,5,5\n",
        lines({"time": 3.5, "request": {"prompt": "x"}, "response": {"usage": {"prompt_tokens": 1}}}),
        lines({"timestamp": 170_000_000, "input_tokens": 5, "output_tokens": 5}),
        mooncake([1_300_000_000 + 1_000_000 * at for at in range(60)]),
        mooncake([1_300_000_000 + 1009 * at * at for at in range(300)]),
        "time,input_tokens,output_tokens\n1300000000,5,5\n1400000000,5,5\n",
    ],
)
def test_what_leaves_more_than_one_unit_is_asked_for(tmp_path: Path, text: str) -> None:
    """Also a number of two days in milliseconds, which was read as a date of 1975, and microseconds of half
    an hour, which were read as dates of years.
    """
    with pytest.raises(BadInput, match="--unit"):
        read_any(put(tmp_path, text))
    assert read_any(put(tmp_path, text), unit="s").meta["source"]


@pytest.mark.parametrize(
    ("text", "unit", "why"),
    [
        (mooncake([1_780_000_000 + at for at in range(3)]), "s", "dates since 1970"),
        (mooncake([1_780_000_000_000 + at * 997 for at in range(3)]), "ms", "dates since 1970"),
        (mooncake([1_780_000_000_000_000_123 + at for at in range(3)]), "ns", "dates since 1970"),
        (burstgpt([5, 45, 118, 230], took=2), "s", "faster than any engine"),
        (bailian([61.114, 68.5, 75.25, 81.0, 99.5]), "s", "faster than any engine"),
        (mooncake([3000 * (at // 5) for at in range(200)], 8192), "ms", "steps of 3,000 s"),
        (mooncake([7, 7, 7]), "s", "all stamps are the same"),
    ],
)
def test_evidence_that_leaves_one_unit_decides(tmp_path: Path, text: str, unit: str, why: str) -> None:
    decided = read_any(put(tmp_path, text))
    assert decided.meta["unit"] == unit
    assert why in str(decided.meta["unit_known_by"])
    assert decided.digest == read_any(put(tmp_path, text), unit=unit).digest


def test_published_traces_need_no_answer(real: Callable[[str], Path]) -> None:
    assert read_any(real("mooncake_conversation_trace.jsonl")).meta["unit"] == "ms"


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_every_time_of_a_row_is_in_the_unit(tmp_path: Path, unit: str) -> None:
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]
    trace = read_any(put(tmp_path, burstgpt([at * scale for at in (5, 45, 118)], took=2 * scale)), unit=unit)
    assert trace.obs_e2e_s.tolist() == [2, 2, 2]
    assert trace.duration_s == pytest.approx(113, abs=1)
    text = lines(
        {"session_id": "a", "timestamp": 0, "input_length": 9, "output_length": 9},
        {"session_id": "a", "delay": 1.5 * scale, "input_length": 19, "output_length": 9},
    )
    trace = read_any(put(tmp_path, text), unit=unit, dequantise=False)
    assert (trace.think_s[1], trace.arrival_s[1]) == pytest.approx((1.5, 1.5))
    for time in ("timestamp", "time"):
        text = f"{time},input_tokens,output_tokens\n" + "".join(f"{at * scale},5,5\n" for at in (0.0, 1.5))
        assert read_any(put(tmp_path, text), unit=unit).duration_s == pytest.approx(1.5)


def test_years_between_two_requests_are_taken_where_the_file_names_the_unit(tmp_path: Path) -> None:
    written = "arrival_s,input_len,output_len\n5,5,5\n100000000,5,5\n"
    assert read_any(put(tmp_path, written)).duration_s == pytest.approx(99_999_995)
    dates = "time,input_tokens,output_tokens\n1300000000,5,5\n1400000000,5,5\n"
    assert read_any(put(tmp_path, dates), unit="s").duration_s == pytest.approx(100_000_000)


def test_a_stamp_since_1970_in_nanoseconds_is_exact(tmp_path: Path) -> None:
    trace = read_any(put(tmp_path, mooncake([1_780_000_000_000_000_001 + 7 * at for at in range(3)])))
    assert np.diff(trace.arrival_s).tolist() == pytest.approx([7e-9, 7e-9])
    assert trace.meta["start_ns"] == 1_780_000_000_000_000_001


@pytest.mark.parametrize("name", [name for name in FORMATS if not importers()[FORMATS[name][1]].takes_unit])
def test_a_unit_is_refused_where_the_file_writes_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="leave --unit out"):
        read_any(put(tmp_path, FORMATS[name][0]), unit="ms")


def test_a_unit_beside_a_column_that_names_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="leave --unit out"):
        read_any(put(tmp_path, FORMATS["generic"][0]), unit="ms")
    with pytest.raises(BadInput, match="unit 'sec' is not known"):
        read_any(put(tmp_path, mooncake([1, 2])), unit="sec")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ((CASES / "burst.csv").read_text(), "line 3: 'Response tokens' is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n,374,44\n", "line 2: 'TIMESTAMP' is empty"),
        ("arrival_s,input_len,output_len\n1,2,3\n2,,3\n", "line 3: 'input_len' is empty"),
        ('{"timestamp": 1, "input_length": null, "output_length": 1}\n', "line 1: 'input_length' is null"),
        (FORMATS["litellm"][0].replace("150,100,50", "150,,50", 1), "line 2: 'prompt_tokens' is empty"),
    ],
)
def test_an_empty_cell_is_named_by_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        read_any(put(tmp_path, text))
    assert "did you mean" not in str(refused.value)
