"""Hashes, tokenizer and the reading of exchanges; the middleware as vLLM loads it."""

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traffic.upstream import Upstream, post, proxied, served
from tuner.errors import BadInput
from tuner.traffic.capture.files import Sink
from tuner.traffic.capture.recorder import Recorder
from tuner.traffic.exchange import (
    Fingerprints,
    Tokenizer,
    count_tokens,
    read_request,
    read_response,
    runs,
    unpacked,
)
from tuner.traffic.importers import read_any

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_equal_prefixes_get_equal_numbers_and_tails_none() -> None:
    prints = Fingerprints()
    assert prints.blocks(range(40)) == [0, 1]
    assert prints.blocks([*range(16), *range(100, 116)]) == [0, 2]
    assert prints.blocks(range(16, 32)) == [3]  # the same tokens after nothing are another prefix
    assert prints.blocks(range(16), "adapter") == [4]
    assert prints.text_blocks(b"x" * 130) == [5, 6]


def test_hashes_of_two_captures_cannot_be_compared() -> None:
    """Keyed: who guesses a prompt cannot confirm it; a destroyed key is overwritten."""
    one, other = Fingerprints(), Fingerprints()
    for prints in (one, other):
        prints.blocks(range(16))
    assert not set(one._numbers) & set(other._numbers)
    one.destroy()
    assert set(one._key) == {0}
    assert not one._numbers
    assert not one._names


def test_memory_is_bounded() -> None:
    prints = Fingerprints(most=10)
    first = prints.blocks(range(16))
    prints.blocks(range(1000, 1000 + 16 * 20))
    assert len(prints._numbers) == 10
    assert prints.blocks(range(16)) != first


@given(st.lists(st.integers(0, 50), max_size=40))
def test_runs_go_round(ids: list[int]) -> None:
    assert unpacked(runs(ids)) == ids


@pytest.mark.parametrize("packed", [[[1]], [[-1, 2]], [[1, 0]], [["a", 1]], [[1, 10**9]]])
def test_runs_that_are_none_are_refused(packed: Any) -> None:
    with pytest.raises(ValueError, match=r"run|unpack"):
        unpacked(packed)


def test_bodies_of_every_kind_are_understood() -> None:
    assert read_request({"prompt": [1, 2, 3]}).ids == (1, 2, 3)
    assert read_request({"prompt": [[1, 2], [3]]}).prompts == 2
    assert read_request({"prompt": ["a", "b"]}).text == "a"
    chat = read_request({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})
    assert chat.text == "user: hi"
    responses = read_request({"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 9})
    assert (responses.text, responses.max_tokens) == ("user: hi", 9)
    full = read_request(
        {"prompt": "x", "n": 2, "max_completion_tokens": 5, "priority": 3, "user": "u"}
        | {"metadata": {"session_id": "s"}, "model": "m", "cache_salt": "c"}
    )
    assert (full.n, full.max_tokens, full.priority, full.client, full.session) == (2, 5, 3, "u", "s")
    assert read_request({"prompt": None, "n": "two", "max_tokens": True}).n == 1
    assert "secret" not in repr(read_request({"prompt": "secret"}))


def test_answers_of_every_kind_are_understood() -> None:
    usage = b'{"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}'
    whole = read_response(b'{"choices": [{"message": {"content": "hi"}}], "usage": %s}' % usage)
    assert (whole.input_tokens, whole.output_tokens, whole.cached_tokens, whole.text) == (7, 3, 4, "hi")
    stream = (
        b': ping\r\n\r\ndata: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\n'
        b'data: {"choices": [{"delta": {"reasoning_content": "so"}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'
    )
    part = read_response(stream)
    assert (part.text, part.chunks, part.complete, part.output_tokens) == ("sohi", 2, False, None)
    end = read_response(stream + b'data: {"choices": [], "usage": %s}\n\ndata: [DONE]\n\n' % usage)
    assert (end.output_tokens, end.complete) == (3, True)
    assert read_response(b'data: {"error": {"code": 500}}\n\n').failed
    assert read_response(b'{"error": {}}').failed
    assert read_response(b"").output_tokens is None
    response = {"output_tokens": 5, "input_tokens": 6, "input_tokens_details": {"cached_tokens": 1}}
    done = {"type": "response.completed", "response": {"usage": response}}
    assert read_response(b"data: %s\n\n" % json.dumps(done).encode()).input_tokens == 6


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """A word-level tokenizer with a chat template, made on the spot."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'capture' is not installed")
    words = {"[UNK]": 0, "<": 1, ">": 2, "user": 3, "assistant": 4, "hello": 5, "world": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    directory = tmp_path / "model"
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def test_the_models_own_tokenizer_counts(tokenizer_dir: Path) -> None:
    tokenizer = Tokenizer(tokenizer_dir)
    assert tokenizer.exact_chat
    assert tokenizer.encode("hello world") == [5, 6]
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [1, 3, 2, 5, 1, 4, 2]
    request = read_request({"messages": [{"role": "user", "content": "hello " * 40}]})
    answer = read_response(b'{"choices": [{"message": {"content": "hello world"}}]}')
    size, out, blocks, source = count_tokens(request, answer, Fingerprints(), tokenizer)
    assert (size, out, len(blocks), source) == (46, 2, 2, "tokens")
    counted = read_response(b'{"usage": {"prompt_tokens": 50, "completion_tokens": 9}}')
    assert count_tokens(request, counted, Fingerprints(), tokenizer)[:2] == (50, 9)


def test_logs_without_usage_are_counted_by_the_tokenizer(tokenizer_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "gateway.jsonl"
    answer = {"choices": [{"message": {"content": "hello world hello"}}]}
    request = {"messages": [{"role": "user", "content": "hello"}]}
    log.write_text(json.dumps({"timestamp": "2026-01-01T00:00:00Z", "request": request, "response": answer}))
    with pytest.raises(BadInput, match="dropped_no_length"):
        read_any(log)
    trace = read_any(log, tokenizer=tokenizer_dir)
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([7], [3])


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such tokenizer file"):
        Tokenizer(tmp_path)
    pytest.importorskip("tokenizers", reason="the extra 'capture' is not installed")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match="not a tokenizer file"):
        Tokenizer(tmp_path)


def test_a_capture_with_the_tokenizer_shares_blocks_of_conversations(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    async def go() -> None:
        recorder = Recorder(Sink(tmp_path / "c.jsonl"), tokenizer=tokenizer_dir)
        async with served(Upstream()) as behind, proxied(f"127.0.0.1:{behind}", recorder) as port:
            turns = [{"role": "user", "content": "hello " * 40}]
            for _ in range(2):
                body = {"messages": turns, "model": "m", "max_tokens": 3}
                await post(port, json.dumps(body).encode(), path="/v1/chat/completions")
                turns = [*turns, {"role": "assistant", "content": "world " * 20}]

    asyncio.run(go())
    trace = read_any(tmp_path / "c.jsonl")
    first, second = (trace.row_blocks(row).tolist() for row in range(2))
    assert first == second[: len(first)]
    assert trace.meta["capture"] == {
        "name": None,
        "started_at": trace.meta["capture"]["started_at"],  # type: ignore[index,call-overload]
        "blocks_from": "tokens",
        "tokenizer": "model",
    }


def test_the_middleware_stands_in_an_engine_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does: the class is imported by name and made with the app alone."""
    monkeypatch.setenv("TUNER_CAPTURE_OUT", str(tmp_path))
    monkeypatch.setenv("TUNER_CAPTURE_NAME", "engine")
    monkeypatch.setenv("TUNER_CAPTURE_EVERY", "day")
    module = importlib.import_module("tuner.traffic.capture.middleware")
    app = module.VllmCapture(Upstream())

    async def go() -> None:
        async with served(app) as port:
            status, _ = await post(port, json.dumps({"prompt": [1] * 20, "max_tokens": 2}).encode())
            assert status == 200

    asyncio.run(go())
    app.recorder.stop()
    (file,) = tmp_path.glob("engine-*.jsonl")
    assert read_any(file).input_len.tolist() == [20]


def test_runs_of_more_blocks_than_a_prompt_has_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 4,000,000 blocks"):
        unpacked([[0, 3_999_999], [0, 2]])
