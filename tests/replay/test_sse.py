import itertools
import json
import random
import socket
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.engine import HEAD, chunked, event, events, usage
from tuner.replay.timing import SO_TIMESTAMPNS, TIMESPEC, TOGETHER_NS, stamp
from tuner.replay.wire import Framing, StreamedAnswer, answer_reader

DONE = b"data: [DONE]\n\n"


def read_answer(stamps: Sequence[int], parts: Sequence[bytes], choices: int = 1) -> StreamedAnswer:
    """Parse a complete answer at once. `choices` is the request's `n`."""
    answer = StreamedAnswer()
    for _ in answer_reader(answer, stamps, parts, choices):
        pass
    return answer


def whole(parts: list[bytes]) -> bytes:
    """An HTTP answer of one chunk per part."""
    return HEAD + b"".join(map(chunked, parts)) + b"0\r\n\r\n"


def answer(parts: list[bytes], stamps: list[int] | None = None) -> StreamedAnswer:
    """Parse an answer whose k-th part came at stamps[k] (the head with the first)."""
    pieces = [chunked(part) for part in parts]
    pieces[0] = HEAD + pieces[0]
    pieces.append(b"0\r\n\r\n")
    when = stamps or list(range(len(parts)))
    return read_answer([*when, when[-1]], pieces)


RICH = [
    b": keep-alive\n\n",
    event({"choices": [{"index": 0, "text": "é漢字"}], "usage": usage(5, 1)}),
    event({"choices": [{"index": 0, "text": ""}], "usage": usage(5, 3)}, b"\r\n\r\n"),
    b'event: note\ndata: {"choices":\ndata: [], "usage": {"prompt_tokens": 5,\ndata: "completion_tokens": 3, '
    b'"prompt_tokens_details": {"cached_tokens": 4}}}\n\n',
    DONE,
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, len(whole(RICH)) - 1), max_size=40, unique=True))
def test_case_r07_an_answer_split_anywhere_says_the_same(cuts: list[int]) -> None:
    raw = whole(RICH)
    bounds = [0, *sorted(cuts), len(raw)]
    parts = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    framing = Framing()
    seen = [framing.complete(parts[: k + 1]) for k in range(len(parts))]
    assert seen == [False] * (len(parts) - 1) + [True]
    found = read_answer(range(len(parts)), parts)
    assert found.error is None
    assert found.chunk_tokens == [1, 2]
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (5, 3, 4)


def test_case_r07_every_single_offset_is_a_fair_place_to_split() -> None:
    raw = whole(RICH)
    for cut in range(1, len(raw)):
        assert read_answer([7, 8], [raw[:cut], raw[cut:]]).chunk_tokens == [1, 2]


def test_an_event_is_stamped_by_the_read_that_completed_it() -> None:
    first, second = event({"choices": [{"text": "a"}], "usage": usage(1, 1)}), DONE
    raw = whole([first, second])
    end = raw.index(b"\n\n\r\n")
    found = read_answer([10, 20, 30], [raw[: end - 3], raw[end - 3 : end + 2], raw[end + 2 :]])
    assert found.chunk_ns == [20]


@pytest.mark.parametrize("per_chunk", [1, 2, 8])
def test_case_r05_tokens_are_counted_from_usage_however_they_are_bundled(per_chunk: int) -> None:
    said = events(9, 24, per_chunk=per_chunk)
    bundles = len(said) - 2
    found = answer(said, [1000 + 10 * per_chunk * k for k in range(len(said))])
    assert found.tokens == found.completion_tokens == 24
    assert len(found.chunk_ns) == bundles
    later = sum(found.chunk_tokens[1:])
    assert (found.chunk_ns[-1] - found.chunk_ns[0]) / later == 10


def test_case_r05_chunks_of_empty_text_still_count() -> None:
    assert answer(events(3, 6, text="")).chunk_tokens == [1] * 6


def test_case_r06_a_role_is_no_token_and_reasoning_is() -> None:
    said = [
        event(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": usage(4, 0)}
        ),
        event({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}], "usage": usage(4, 1)}),
        event({"choices": [{"index": 0, "delta": {"content": "yes"}}], "usage": usage(4, 2)}),
        event({"choices": [], "usage": usage(4, 2)}),
        DONE,
    ]
    found = answer(said, [0, 300, 900, 901, 902])
    assert found.chunk_ns == [300, 900]
    assert found.answer_ns == 900


def test_case_r06_without_continuous_usage_the_role_is_still_no_token() -> None:
    said = [
        event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}),
        event({"choices": [{"index": 0, "delta": {"content": "yes, two"}}]}),
        event({"choices": [], "usage": usage(4, 4)}),
        DONE,
    ]
    found = answer(said, [0, 300, 900, 901, 902])
    assert found.chunk_ns == [300, 900]
    assert found.tokens == 4
    assert found.guessed == 2


def test_case_r08_an_error_after_200_is_a_failure() -> None:
    said = [*events(4, 3)[:2], event({"error": {"message": "engine died", "code": 500}}), DONE]
    found = answer(said)
    assert found.error == "error in the stream: engine died"
    assert found.tokens == 2


def test_case_r08_an_answer_without_its_end_is_a_failure() -> None:
    assert answer(events(4, 3)[:-1]).error == "the answer ended before [DONE]"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'HTTP/1.1 400 No\r\ncontent-length: 32\r\n\r\n{"error":{"message":"too long"}}', "too long"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "empty answer"),
        (b"HTTP/1.1 200 OK\r\n", "no HTTP answer"),
        (whole([b"data: {nonsense\n\n", DONE]), "malformed event"),
    ],
)  # fmt: skip
def test_what_is_no_answer_says_what_it_is(raw: bytes, words: str) -> None:
    found = read_answer([1], [raw])
    assert found.error is not None
    assert words in found.error


def test_several_choices_are_counted_each_by_its_own_usage() -> None:
    said = []
    for done in (1, 2):
        for index in (0, 1):
            said.append(event({"choices": [{"index": index, "text": "x"}], "usage": usage(4, done)}))
    said += [event({"choices": [], "usage": usage(4, 4)}), DONE]
    pieces = [HEAD, *map(chunked, said), b"0\r\n\r\n"]
    found = read_answer(range(len(pieces)), pieces, 2)
    assert found.error is None
    assert found.tokens == found.completion_tokens == 4


def test_the_engines_own_metrics_are_kept() -> None:
    last = event(
        {"choices": [], "usage": usage(4, 1), "metrics": {"time_to_first_token_ms": 12.5, "x": None}}
    )
    assert answer([*events(4, 1)[:1], last, DONE]).engine == {"time_to_first_token_ms": 12.5}


def test_framing_knows_lengths_trailers_and_closing() -> None:
    rng = random.Random(3)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"
    raw = head + b"0123456789"
    cut = rng.randrange(1, len(raw))
    framing = Framing()
    assert [framing.complete([raw[:cut]]), framing.complete([raw[:cut], raw[cut:]])] == [False, True]
    closing = Framing()
    assert not closing.complete([b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({}).encode()])
    assert closing.until_close
    trailing = Framing()
    assert trailing.complete([HEAD + b"1\r\nx\r\n0\r\nDigest: y\r\n\r\n"])


def test_what_was_read_is_stamped_by_the_kernel_where_it_tells() -> None:
    before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
    told = [(socket.SOL_SOCKET, SO_TIMESTAMPNS, TIMESPEC.pack(*divmod(wall - 5_000_000, 1_000_000_000)))]
    found = stamp(time.perf_counter_ns(), told)
    assert before - TOGETHER_NS <= found + 5_000_000 <= after + TOGETHER_NS
    assert stamp(7, []) == 7
    a_wall_clock_that_was_set = [(socket.SOL_SOCKET, SO_TIMESTAMPNS, TIMESPEC.pack(0, 0))]
    now = time.perf_counter_ns()
    assert now <= stamp(now, a_wall_clock_that_was_set) <= time.perf_counter_ns()
