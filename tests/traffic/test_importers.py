"""Importers: every format told by its content and read to the value; what is wrong is named or counted."""

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traffic.formats import AZURE, FORMATS, MOONCAKE, OTLP_OBJECT, UNITS, VLLM_LOG
from tuner.errors import BadInput
from tuner.traffic.importers import detect, read_any
from tuner.traffic.importers.stamps import parse_stamp
from tuner.traffic.trace import STATUSES, Trace, bundled, write

Real = Callable[[str], Path]
Flat = tuple[int, int, int]
CORRUPTIONS = int(os.environ.get("TUNER_TEST_CORRUPTIONS", "300"))


def put(directory: Path, text: str | bytes, name: str = "trace.dat") -> Path:
    path = directory / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def quality(trace: Trace) -> dict[str, int]:
    found = trace.meta["quality"]
    assert isinstance(found, dict)
    return {key: int(str(value)) for key, value in found.items()}


def conserved(trace: Trace) -> bool:
    """Nothing is lost in silence: what was read is kept, or dropped for a stated reason."""
    counts = quality(trace)
    dropped = sum(count for why, count in counts.items() if why.startswith("dropped_"))
    return counts["rows_read"] == len(trace) + dropped


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_told_by_the_content(tmp_path: Path, name: str) -> None:
    text, format = FORMATS[name]
    path = put(tmp_path, text)
    assert detect(path) == format
    trace = read_any(path, unit=UNITS.get(name))
    assert conserved(trace)
    assert read_any(path, format=format, unit=UNITS.get(name)).digest == trace.digest
    packed = put(tmp_path, gzip.compress(text.encode()), "trace.gz")
    assert read_any(packed, unit=UNITS.get(name)).digest == trace.digest


def test_azure_arrivals_are_right_to_a_microsecond(tmp_path: Path) -> None:
    """docs/cases.md R16: seven digits of fraction."""
    trace = read_any(put(tmp_path, AZURE))
    assert trace.arrival_s == pytest.approx([0.0, 4.314579, 4.541877, 5.710403], abs=1e-9)
    assert trace.meta["resolution_s"] == 0.0
    assert "CC-BY 4.0" in str(trace.meta["licence"])


def test_the_whole_azure_trace(real: Real) -> None:
    path = real("AzureLLMInferenceTrace_conv.csv")
    trace = read_any(path)
    lines = path.read_text().splitlines()[1:]
    stamps = np.array([parse_stamp(line.split(",")[0]) for line in lines], np.int64)
    assert len(trace) == len(lines) == 19_366
    assert np.abs(trace.arrival_s - (stamps - stamps[0]) / 1e9).max() < 1e-6
    window = bundled()
    part = trace.take(np.flatnonzero((trace.arrival_s >= 1920) & (trace.arrival_s < 2040)))
    assert part.digest == window.digest


def test_coarse_stamps_are_found_and_spread(real: Real) -> None:
    """docs/cases.md R16: Mooncake's 3 s batches would fire ten requests at once."""
    path = real("mooncake_conversation_trace.jsonl")
    raw, trace = read_any(path, dequantise=False), read_any(path)
    assert trace.meta["resolution_s"] == 3.0
    assert (np.diff(raw.arrival_s) == 0).mean() > 0.9
    gaps = np.diff(trace.arrival_s)
    assert (gaps == 0).mean() < 0.001
    assert gaps.std() / gaps.mean() == pytest.approx(1.01, abs=0.02)
    assert (trace.input_len == raw.input_len).all()  # the order of rows is kept
    shift = trace.arrival_s - raw.arrival_s
    assert shift.max() - shift.min() <= 3.0
    assert int(trace.input_len[0]) == 6758  # R12: to the token


def test_whole_seconds_are_spread_within_the_second(tmp_path: Path) -> None:
    """docs/cases.md R16: BurstGPT and vLLM's log lines; version 3 has other columns at other places."""
    for name in ("burstgpt-1", "burstgpt-3", "vllm-log"):
        trace = read_any(put(tmp_path, FORMATS[name][0]), unit=UNITS.get(name))
        assert trace.meta["spread_s"] == 1.0
        assert quality(trace)["arrivals_spread"] == len(trace)
    third = read_any(put(tmp_path, FORMATS["burstgpt-3"][0]))
    assert third.input_len.tolist() == [906, 36, 1779]
    assert third.parent.tolist() == [-1, -1, 0]
    assert third.obs_e2e_s.tolist() == [43, 2, 8]
    first = read_any(put(tmp_path, FORMATS["burstgpt-1"][0]), unit="s", dequantise=False)
    assert first.arrival_s.tolist() == [0, 40, 113]
    assert [STATUSES[code] for code in first.status] == ["ok", "ok", "error"]


def test_spreading_is_the_same_each_time_and_keeps_order() -> None:
    from tuner.traffic.importers.stamps import resolution_s, spread

    arrival = np.repeat(np.arange(50.0), 7)
    assert resolution_s(arrival) == 1.0
    once, again = spread(arrival, 1.0), spread(arrival, 1.0)
    assert (once == again).all()
    assert (np.diff(once) >= 0).all()
    assert ((once - arrival) < 1.0).all()
    fine = np.cumsum(np.random.default_rng(0).exponential(1.0, 500))
    assert resolution_s(fine) == 0.0


def test_one_id_partial_and_whole_is_counted(tmp_path: Path) -> None:
    """docs/cases.md R15: an id that is a part here and a whole block there; ids beyond the length."""
    trace = read_any(put(tmp_path, MOONCAKE), unit="ms")
    assert quality(trace)["blocks_partial_and_whole"] == 1
    more = json.dumps({"timestamp": 9000, "input_length": 100, "output_length": 1, "hash_ids": [1, 2, 3]})
    fewer = json.dumps({"timestamp": 9500, "input_length": 9000, "output_length": 1, "hash_ids": [1]})
    trace = read_any(put(tmp_path, f"{MOONCAKE}\n{more}\n{fewer}\n"), unit="ms")
    assert quality(trace)["blocks_beyond_length_cut"] == 1
    assert quality(trace)["blocks_short_of_length"] == 1
    assert trace.row_blocks(4).tolist() == [6]


def test_rows_without_ids_and_epoch_stamps_are_taken(tmp_path: Path) -> None:
    """docs/cases.md R12: missing hash_ids are unique prompts, stamps of today are rebased."""
    rows = [
        {"timestamp": 1_780_000_000_000 + at, "input_length": 5, "output_length": 1} for at in (0, 11, 25)
    ]
    trace = read_any(put(tmp_path, "\n".join(map(json.dumps, rows))))
    assert trace.arrival_s == pytest.approx([0, 0.011, 0.025])
    assert trace.block_offsets.tolist() == [0, 0, 0, 0]


def test_odd_rows_are_repaired_or_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        (5.0, 10, 5),
        (1.0, 20, 5),
        (2.5, 0, 5),
        (3.25, -4, 5),
        (4.1, 7, -1),
        (6.3, 9, 0),
        (7.7, 900, 200),
    ]
    text = "arrival_s,input_len,output_len\n" + "\n".join(",".join(map(str, row)) for row in rows)
    trace = read_any(put(tmp_path, text), max_len=1000)
    assert trace.arrival_s == pytest.approx([0.0, 4.0, 5.3])
    assert trace.input_len.tolist() == [20, 10, 9]
    assert [STATUSES[code] for code in trace.status] == ["ok", "ok", "error"]
    assert quality(trace) == {
        "rows_read": 7,
        "unsorted": 1,
        "dropped_no_input": 1,
        "dropped_negative_length": 2,
        "no_output_flagged": 1,
        "not_ok_kept": 1,
        "dropped_over_length": 1,
    }
    assert read_any(put(tmp_path, text)).input_len.tolist() == [20, 10, 9, 900]


def test_spend_logs_keep_what_reached_an_engine(tmp_path: Path) -> None:
    trace = read_any(put(tmp_path, FORMATS["litellm"][0]))
    assert trace.input_len.tolist() == [100, 100]
    assert trace.arrival_s.tolist() == [0.0, 2.875]  # +02:00 is told from UTC
    assert trace.obs_ttft_s[0] == 0.5
    assert trace.obs_e2e_s.tolist() == [2.0, 1.0]
    counts = quality(trace)
    assert (counts["dropped_other_call"], counts["dropped_cache_hit"], counts["dropped_duplicate"]) == (
        1,
        1,
        1,
    )
    header, *lines = FORMATS["litellm"][0].strip().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    assert read_any(put(tmp_path, "\n".join(map(json.dumps, rows)))).digest == trace.digest
    assert read_any(put(tmp_path, json.dumps(rows, indent=1))).digest == trace.digest


def test_spans_in_old_and_new_names(tmp_path: Path) -> None:
    trace = read_any(put(tmp_path, FORMATS["otlp"][0]))
    assert trace.input_len.tolist() == [10, 20, 9]
    assert trace.n.tolist() == [2, 1, 1]
    assert trace.max_tokens.tolist() == [64, -1, -1]
    assert trace.arrival_s[1] == pytest.approx(2.000000014, abs=1e-10)  # the inner of two spans
    pretty = put(tmp_path, json.dumps(OTLP_OBJECT, indent=2))
    assert detect(pretty) == "otlp"
    assert read_any(pretty).digest == trace.digest


def test_a_vllm_log_is_honest_about_what_it_lacks(tmp_path: Path) -> None:
    trace = read_any(put(tmp_path, VLLM_LOG), dequantise=False)
    assert trace.arrival_s.tolist() == [0.0, 3.0]  # over new year, without a year in the stamps
    assert trace.input_len.tolist() == [40, 33]
    assert trace.output_len.tolist() == [3, 5]
    assert trace.row_blocks(0).tolist() == trace.row_blocks(1).tolist() == [0, 1]
    assert quality(trace)["dropped_no_length"] == 1
    assert quality(trace)["output_len_from_max_tokens"] == 1
    info_only = "\n".join(line for line in VLLM_LOG.splitlines() if "DEBUG" not in line)
    with pytest.raises(BadInput, match="lengths only at DEBUG"):
        read_any(put(tmp_path, info_only))


def test_a_real_vllm_log_line_is_read(real: Real) -> None:
    with pytest.raises(BadInput, match="1 request, but no prompt lengths"):
        read_any(real("vllm_0.32_request_log_line.txt"))


def test_an_agent_session_keeps_its_prefixes(real: Real) -> None:
    trace = read_any(real("tracelab_example_agent_session.jsonl"))
    assert len(trace) == 19
    assert len(set(trace.session.tolist())) == 2
    before = [row for row in range(19) if trace.parent[row] >= 0]
    assert len(before) == 17
    for row in before:
        ids, above = trace.row_blocks(row).tolist(), trace.row_blocks(int(trace.parent[row])).tolist()
        prefix = int(trace.obs_cached[row])
        known = above + [None] * 10_000
        shared = next(i for i in range(10_000) if i >= len(ids) or ids[i] != known[i])
        assert shared <= prefix // 16


@pytest.mark.parametrize("name", ["burstgpt_1_head.csv", "burstgpt_3_head.csv", "qwen_bailian_head.jsonl"])
def test_published_heads_are_read(real: Real, name: str) -> None:
    trace = read_any(real(name), unit="s")
    assert len(trace) >= 2
    assert conserved(trace)


def test_our_own_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    write(bundled(), tmp_path / "x.anything")
    assert read_any(tmp_path / "x.anything").digest == bundled().digest
    short = read_any(tmp_path / "x.anything", max_len=2000)
    assert quality(short)["dropped_over_length"] == len(bundled()) - len(short) > 0
    assert conserved(short)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "the file is empty"),
        ("a,b\n1,2\n", {}, "it is not known which column is arrival_s. Name it with `tuner trace import"),
        ("arrival_s,input_tokns,output_len\n1,2,3\n", {}, r"input_len .did you mean 'input_tokns'"),
        ("arrival_s,input_len,output_len\n1,2,x\n", {}, "line 2: 'output_len' is 'x', expected a number"),
        ("arrival_s,input_len,output_len\n1,2.5,3\n", {}, "line 2: 'input_len' is '2.5', expected a whole"),
        ("arrival_s,input_len,output_len\n1,2,3\nnan,2,3\n", {}, "line 3: 'arrival_s' is 'nan'"),
        ("arrival_s,input_len,output_len\n1,2\n3,4,5\n", {}, "line 2: 2 cells, but the header has 3"),
        ("arrival_s,input_len,output_len\n1,9999999999,3\n", {}, "below 2147483648"),
        ("arrival_s,input_len,output_len\n", {}, "no request in it"),
        ("arrival_s,input_len,output_len\n1,0,1\n", {}, "no request in it .1 dropped_no_input"),
        ("time,input_len,output_len\n1.5,2,3\n", {}, "is not a date .* a number since 1970"),
        ('{"timestamp": 5, "input_tokens": 1, "output_tokens": 1}\n', {}, "number since 1970, give its unit"),
        (MOONCAKE.replace("1600", '"many"'), {}, "line 2: 'input_length' is 'many'"),
        (MOONCAKE.replace("[46, 50]", "[46, null]"), {}, "line 3: 'hash_ids' holds None"),
        (MOONCAKE.replace('"input_length": 600', '"input_len": 600'), {}, "did you mean 'input_len'"),
        (MOONCAKE.replace("}\n{", "\n{", 1), {}, "line 1: not JSON"),
        ('{"timestamp": 1, "text_input": "hi", "output_length": 3}', {}, "text without 'input_length'"),
        (AZURE, {"format": "azur"}, "did you mean 'azure'"),
        (AZURE, {"columns": {"arival_s": "TIMESTAMP"}}, "did you mean 'arrival_s'"),
        (AZURE, {"columns": {"arrival": "TIMESTAMPS"}}, "did you mean 'TIMESTAMP'"),
        (AZURE, {"format": "azure", "columns": {"arrival": "TIMESTAMP"}}, "columns can be mapped only for"),
        (AZURE.replace("2023-11-16 18:15:51", "2023-13-16 18:15:51"), {}, "line 4: 'TIMESTAMP' is '2023-13"),
        (b"\xff\xfe\x00", {}, "not UTF-8"),
        (b"\x1f\x8b\x08broken", {}, "cannot be unpacked"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, text: str | bytes, options: dict[str, object], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        read_any(put(tmp_path, text), **options)  # type: ignore[arg-type]


def test_columns_can_be_named(tmp_path: Path) -> None:
    text = "when,in,out,who,conv\n1000,5,6,a,x\n1500,7,8,b,x\n1250,9,1,a,y\n"
    names = {"arrival_ms": "when", "input_len": "in", "output_len": "out", "client": "who", "session": "conv"}
    trace = read_any(put(tmp_path, text), names)
    assert trace.arrival_s.tolist() == [0.0, 0.25, 0.5]
    assert trace.client.tolist() == [0, 0, 1]
    assert trace.parent.tolist() == [-1, -1, 0]
    assert trace.turn.tolist() == [0, 0, 1]


@pytest.mark.parametrize("key", ["received_at", "arrival", "ts", "timestamp"])
def test_a_gateways_log_is_read_by_its_usual_names(tmp_path: Path, key: str) -> None:
    """Dates with a zone, HTTP status codes, a column that nothing is known of."""
    codes = {
        200: "ok",
        204: "ok",
        499: "cancelled",
        504: "timeout",
        408: "timeout",
        429: "error",
        503: "error",
    }
    rows = [f"r-{i},2026-11-20T09:00:0{i}.65{i}+00:00,45,12,{code},x" for i, code in enumerate(codes)]
    text = "\n".join([f"request_id,{key},prompt_tokens,completion_tokens,status,zone", *rows]) + "\n"
    trace = read_any(put(tmp_path, text))
    assert [STATUSES[code] for code in trace.status.tolist()] == list(codes.values())
    named = read_any(put(tmp_path, text), {"arrival_s": key})
    assert named.arrival_s.tolist() == trace.arrival_s.tolist()
    assert trace.arrival_s.tolist() == pytest.approx([1.001 * i for i in range(7)])


def test_lengths_inside_an_object_have_a_path(tmp_path: Path) -> None:
    one = {"ts": 1764000000.5, "usage": {"prompt_tokens": 7, "completion_tokens": 3, "of": {"x": 1}}}
    two = {"ts": 1764000002.5, "usage": {"prompt_tokens": 9}, "made": {"n": 4}}
    names = {"arrival": "ts", "input_len": "usage.prompt_tokens", "output_len": "usage.completion_tokens"}
    trace = read_any(put(tmp_path, json.dumps(one)), names)
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([7], [3])
    with pytest.raises(BadInput, match=r"line 2: 'usage\.completion_tokens' is missing"):
        read_any(put(tmp_path, json.dumps(one) + "\n" + json.dumps(two)), names)
    assert read_any(put(tmp_path, json.dumps(one)), format="generic").input_len.tolist() == [7]


def test_an_exchange_is_found_where_it_is_mapped(tmp_path: Path) -> None:
    one = {
        "at": "2026-06-01T10:00:00Z",
        "rq": {"b": {"prompt": [1] * 20}},
        "rs": {"usage": {"prompt_tokens": 20}},
    }
    names = {"arrival": "at", "request": "rq.b", "response": "rs"}
    trace = read_any(put(tmp_path, json.dumps(one)), names)
    assert trace.input_len.tolist() == [20]
    assert len(trace.row_blocks(0)) == 1
    with pytest.raises(BadInput, match=r"'rq\.c' is missing"):
        read_any(put(tmp_path, json.dumps(one)), names | {"request": "rq.c"})


def test_a_last_line_that_was_cut_is_dropped_and_counted(tmp_path: Path) -> None:
    for name in ("mooncake", "capture", "bailian", "azure", "burstgpt-1"):
        text = FORMATS[name][0].rstrip()
        trace = read_any(put(tmp_path, text[:-5]), format=FORMATS[name][1], unit=UNITS.get(name))
        assert quality(trace).get("cut_last_line", 0) == (0 if name == "burstgpt-1" else 1), name


STAMP = st.datetimes()


@given(STAMP, st.integers(0, 9_999_999), st.integers(-14 * 60, 14 * 60))
def test_stamps_are_exact_to_the_last_digit(when: object, fraction: int, shift: int) -> None:
    from datetime import UTC, datetime, timedelta

    assert isinstance(when, datetime)
    whole = max(when.replace(microsecond=0), datetime(1900, 1, 1))
    sign, minutes = "+" if shift >= 0 else "-", abs(shift)
    text = f"{whole:%Y-%m-%d}T{whole:%H:%M:%S}.{fraction:07d}{sign}{minutes // 60:02d}:{minutes % 60:02d}"
    seconds = (whole.replace(tzinfo=UTC) - timedelta(minutes=shift)) - datetime(1970, 1, 1, tzinfo=UTC)
    assert parse_stamp(text) == int(seconds.total_seconds()) * 1_000_000_000 + fraction * 100


ROWS = st.lists(
    st.tuples(
        st.integers(0, 10**9),
        st.integers(1, 4000),
        st.integers(1, 500),
        st.lists(st.integers(0, 30), max_size=8),
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_mooncake_goes_round(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int, list[int]]]
) -> None:
    """Written as JSONL and read: arrivals to the microsecond, lengths and sharing the same."""
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [
        json.dumps(dict(zip(keys, (*row[:3], row[3][: -(-row[1] // 512)]), strict=True))) for row in rows
    ]
    trace = read_any(put(tmp_path_factory.mktemp("t"), "\n".join(lines)), unit="ms", dequantise=False)
    order = sorted(range(len(rows)), key=lambda place: rows[place][0])
    assert trace.input_len.tolist() == [rows[place][1] for place in order]
    first = rows[order[0]][0]
    assert trace.arrival_s * 1e3 == pytest.approx([rows[place][0] - first for place in order], abs=1e-3)
    ids: dict[int, int] = {}
    for row, place in enumerate(order):
        for theirs, ours in zip(rows[place][3], trace.row_blocks(row).tolist(), strict=False):
            assert ids.setdefault(theirs, ours) == ours
    assert len(set(ids.values())) == len(ids)


def _day(ms: int, zone: str = "") -> str:
    return f"2026-03-0{1 + ms // 86_400_000} " + _time(ms % 86_400_000) + zone


def _time(ms: int) -> str:
    return f"{ms // 3_600_000:02d}:{ms // 60_000 % 60:02d}:{ms // 1000 % 60:02d}.{ms % 1000:03d}0000"


def _otlp(rows: list[Flat]) -> str:
    spans = [
        {
            "spanId": f"{number}",
            "startTimeUnixNano": str(1_780_000_000_000_000_000 + ms * 1_000_000),
            "attributes": [
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": str(size)}},
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": out}},
            ],
        }
        for number, (ms, size, out) in enumerate(rows)
    ]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})


def _capture(rows: list[Flat]) -> str:
    lines: list[dict[str, int]] = [{"capture": 1, "block_size": 16}]
    lines += [{"r": number, "t": ms * 1_000_000, "i": size} for number, (ms, size, _) in enumerate(rows)]
    lines += [{"r": number, "e": 5, "o": out} for number, (_, _, out) in enumerate(rows)]
    return "\n".join(map(json.dumps, lines))


def _table(header: str, rows: list[str]) -> str:
    return "\n".join([header, *rows]) + "\n"


WRITERS: dict[str, Callable[[list[Flat]], str]] = {
    "azure": lambda rows: _table(
        "TIMESTAMP,ContextTokens,GeneratedTokens", [f"{_day(ms)},{size},{out}" for ms, size, out in rows]
    ),
    "burstgpt": lambda rows: _table(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        [f"{ms / 1000},m,{size},{out},{size + out},x" for ms, size, out in rows],
    ),
    "generic": lambda rows: _table(
        "output_tokens,arrival_ms,input_tokens", [f"{out},{ms},{size}" for ms, size, out in rows]
    ),
    "litellm": lambda rows: _table(
        "startTime,prompt_tokens,completion_tokens",
        [f"{_day(ms, 'Z')},{size},{out}" for ms, size, out in rows],
    ),
    "bailian": lambda rows: "\n".join(
        json.dumps(
            {"chat_id": number, "parent_chat_id": -1, "timestamp": ms / 1000}
            | {"input_length": size, "output_length": out, "hash_ids": []}
        )
        for number, (ms, size, out) in enumerate(rows)
    ),
    "openai": lambda rows: "\n".join(
        json.dumps(
            {"timestamp": _day(ms), "request": {"prompt": "x"}}
            | {"response": {"usage": {"prompt_tokens": size, "completion_tokens": out}}}
        )
        for ms, size, out in rows
    ),
    "otlp": _otlp,
    "capture": _capture,
}


@pytest.mark.parametrize("format", WRITERS)
@given(
    st.lists(
        st.tuples(st.integers(0, 9 * 86_400_000 - 1), st.integers(1, 10**6), st.integers(1, 10**5)),
        min_size=1,
    )
)
@settings(max_examples=25, deadline=None)
def test_rows_go_round(tmp_path_factory: pytest.TempPathFactory, format: str, rows: list[Flat]) -> None:
    """Written in a format and read: told by content, lengths exact, arrivals to the microsecond."""
    path = put(tmp_path_factory.getbasetemp(), WRITERS[format](rows), f"{format}.dat")
    assert detect(path) == format
    trace = read_any(path, unit="s" if format in ("burstgpt", "bailian") else None, dequantise=False)
    in_order = sorted(rows, key=lambda row: row[0])
    assert trace.input_len.tolist() == [row[1] for row in in_order]
    assert trace.output_len.tolist() == [row[2] for row in in_order]
    since = [(row[0] - in_order[0][0]) / 1e3 for row in in_order]
    assert np.abs(trace.arrival_s - since).max() < 1e-6


def corrupted(data: bytes, chance: random.Random) -> bytes:
    """One to four injuries: a byte changed, bytes lost or put in, a cut, a piece twice, a strange value."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found)) if found else 0
        kind = chance.randrange(6)
        if kind == 0 and found:
            found[at] = chance.randrange(256)
        elif kind == 1:
            del found[at : at + chance.randint(1, 20)]
        elif kind == 2:
            found[at:at] = bytes(
                chance.choice(b'0123456789,"{}[]:-.eE\n\x00\xff') for _ in range(chance.randint(1, 9))
            )
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            start = chance.randrange(len(found)) if found else 0
            found[at:at] = found[start : start + chance.randint(1, 60)]
        else:
            found[at:at] = chance.choice(STRANGE)
    return bytes(found)


STRANGE = (
    b"-1",
    b"1e400",
    b"99999999999999999999",
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"NaN",
    b"\r\n",
    b"-0",
)


def attempt(path: Path, format: str | None, unit: str | None = None) -> Trace | BadInput:
    try:
        return read_any(path, format=format, unit=unit)
    except BadInput as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_no_corruption_ends_in_a_crash_or_a_silent_loss(tmp_path: Path, name: str) -> None:
    """Each ends in one clear sentence that names the file, or in a trace whose repairs are counted."""
    text, format = FORMATS[name]
    refused = 0
    for seed in range(CORRUPTIONS):
        path = put(tmp_path, corrupted(text.encode(), random.Random(seed)))
        found = attempt(path, None if seed % 3 else format, UNITS.get(name))
        if isinstance(found, BadInput):
            refused += 1
            assert path.name in str(found)
        else:
            assert conserved(found)
    assert 0 < refused < CORRUPTIONS
    kept = CORRUPTIONS - refused
    print(
        f"{name}: {CORRUPTIONS:,} corruptions, {refused:,} refused by a sentence, {kept:,} read and conserved"
    )


@pytest.mark.parametrize("spaces", ["", " ", "\n\t"])
def test_a_json_list_is_read_item_by_item(tmp_path: Path, spaces: str) -> None:
    """On one line or many, with items that go over the pieces that are read."""
    items = [
        {"timestamp": f"2026-06-01T10:00:{at:02d}Z", "note": "ä]}," * (40_000 if at == 7 else 1)}
        | {
            "request": {"prompt": "x"},
            "response": {"usage": {"prompt_tokens": at + 1, "completion_tokens": 1}},
        }
        for at in range(30)
    ]
    text = f"{spaces}[{spaces}{f'{spaces},{spaces}'.join(map(json.dumps, items))}{spaces}]{spaces}"
    assert read_any(put(tmp_path, text), format="openai").input_len.tolist() == list(range(1, 31))
    for cut, said in ((text.rstrip()[:-9], "item 30: not JSON"), (text + "x", "something after the list")):
        with pytest.raises(BadInput, match=said):
            read_any(put(tmp_path, cut), format="openai")
    with pytest.raises(BadInput, match="item 2: an object is expected, not int"):
        read_any(put(tmp_path, f"[{MOONCAKE.splitlines()[0]}, 5]"), format="mooncake")


def test_what_is_too_large_for_a_trace_is_refused_before_it_is_read(tmp_path: Path) -> None:
    spaces = gzip.compress(b" " * 2**20)
    for text, said in (
        (gzip.compress(AZURE.encode()) + spaces * 90, "line 6: longer than|cannot be unpacked: it grows"),
        (AZURE.encode() + b'"a\n",' * 2**18, "a row longer than"),
        (b'{"resourceSpans": [\n' + (b"1," * 2**9 + b"\n") * 2**15 * 3, "one JSON document of more than"),
    ):
        with pytest.raises(BadInput, match=said):
            read_any(put(tmp_path, text))
