"""Reads one request and its answer in OpenAI's format: what a trace needs of them, without their text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.traffic.fingerprint import Fingerprints
from tuner.traffic.tokenizer import Tokenizer, plain_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """A request body: the prompt as token ids or text (in memory only), and how it wants to be served.

    `beam` is the width of a beam search, which vLLM takes from `n`; 0: none.
    """

    ids: tuple[int, ...] | None = None
    text: str | None = field(default=None, repr=False)
    messages: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    tools: Any = field(default=None, repr=False)
    prompts: int = 1
    n: int = 1
    beam: int = 0
    max_tokens: int = -1
    priority: int = 0
    model: str = ""
    cache_salt: str = ""
    session: str | None = None
    client: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFacts:
    """What the answer shows about tokens; `chunks` counts events with text, `text` is used for
    counting only.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    chunks: int = 0
    text: str = field(default="", repr=False)
    failed: bool = False
    complete: bool = False


SESSION_KEYS = ("session_id", "conversation_id", "conversation", "prompt_cache_key")


def read_request(body: Mapping[str, Any]) -> RequestFacts:
    """Read a body of completions, chat completions or responses; odd values are left at their defaults."""
    metadata = body.get("metadata") if isinstance(body.get("metadata"), dict) else {}
    holders = (body, metadata or {}, body.get("extra") if isinstance(body.get("extra"), dict) else {})
    session = next(
        (h[k] for h in holders for k in SESSION_KEYS if h and isinstance(h.get(k), str | int)), None
    )
    user = body.get("safety_identifier") or body.get("user")
    most = next(
        (body[k] for k in ("max_completion_tokens", "max_tokens", "max_output_tokens") if body.get(k)), -1
    )
    n = _count(body.get("n"), 1)
    found = RequestFacts(
        n=n,
        beam=max(1, n) if body.get("use_beam_search") else 0,
        max_tokens=_count(most, -1),
        priority=_count(body.get("priority"), 0),
        model=str(body.get("model") or ""),
        cache_salt=str(body.get("cache_salt") or ""),
        session=None if session is None else str(session),
        client=user if isinstance(user, str) and user else None,
        tools=body.get("tools"),
    )
    return _with_prompt(found, body)


def _with_prompt(found: RequestFacts, body: Mapping[str, Any]) -> RequestFacts:
    prompt = body.get("prompt", body.get("input"))
    messages = body.get("messages")
    if messages is None and isinstance(prompt, list) and prompt and all(isinstance(p, dict) for p in prompt):
        messages = prompt
    if isinstance(messages, list):
        kept = tuple(one for one in messages if isinstance(one, dict))
        return replace(found, messages=kept, text="\n".join(plain_text(one) for one in kept))
    if isinstance(prompt, str):
        return replace(found, text=prompt)
    if isinstance(prompt, list) and prompt:
        if all(type(one) is int for one in prompt):
            return replace(found, ids=tuple(prompt))
        first = prompt[0]
        if isinstance(first, list) and all(type(one) is int for one in first):
            return replace(found, ids=tuple(first), prompts=len(prompt))
        if isinstance(first, str):
            return replace(found, text=first, prompts=len(prompt))
    return found


def read_response(data: bytes, content_type: str = "") -> ResponseFacts:
    """Read an answer: one JSON document or a stream of events, complete or cut."""
    if b"data:" in data[:4096] and not data.lstrip().startswith(b"{"):
        return _streamed(data)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return ResponseFacts(failed=bool(data) and "json" in content_type)
    if not isinstance(document, dict):
        return ResponseFacts(failed=True)
    text = "".join(_choice_text(choice) for choice in _list(document.get("choices")))
    found = ResponseFacts(text=text, chunks=bool(text), failed="error" in document, complete=True)
    return _with_usage(found, document)


def _streamed(data: bytes) -> ResponseFacts:
    """All events; only the last ones when they carry the engine's own count and no error came before."""
    tail = data[-4096:]
    if b'"usage":{' in tail.replace(b" ", b"") and b'"error"' not in data:
        found = _events(tail[max(0, tail.find(b"\ndata:")) :] if len(data) > 4096 else data)
        if found.output_tokens is not None:
            return replace(found, chunks=data.count(b"data:"))
    return _events(data)


def _events(data: bytes) -> ResponseFacts:
    found, pieces, chunks = ResponseFacts(), [], 0
    for line in data.replace(b"\r\n", b"\n").split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            found = replace(found, complete=True)
            continue
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict):
            continue
        piece = "".join(_choice_text(choice) for choice in _list(event.get("choices")))
        if event.get("type") == "response.output_text.delta" and isinstance(event.get("delta"), str):
            piece = event["delta"]
        if piece:
            pieces.append(piece)
            chunks += 1
        if event.get("error"):
            found = replace(found, failed=True)
        if event.get("type") == "response.completed" and isinstance(event.get("response"), dict):
            event, found = event["response"], replace(found, complete=True)
        found = _with_usage(found, event)
    return replace(found, text="".join(pieces), chunks=chunks)


def _with_usage(found: ResponseFacts, document: Mapping[str, Any]) -> ResponseFacts:
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return found
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return replace(
        found,
        input_tokens=_known(usage.get("prompt_tokens", usage.get("input_tokens")), found.input_tokens),
        output_tokens=_known(usage.get("completion_tokens", usage.get("output_tokens")), found.output_tokens),
        cached_tokens=_known(cached, found.cached_tokens),
    )


def count_tokens(
    request: RequestFacts, answer: ResponseFacts, prints: Fingerprints, tokenizer: Tokenizer | None
) -> tuple[int | None, int | None, list[int], str]:
    """(prompt tokens, answer tokens, block numbers, what the blocks are made from); None where a length is
    not known.

    The engine's own usage is preferred to the tokenizer's count. Blocks are made from token ids (given, or
    made by the tokenizer), else from the text's bytes. Several prompts in a request count together, as the
    engine counts them.
    """
    ids = request.ids
    if ids is None and tokenizer is not None and request.text is not None:
        if request.messages:
            ids = tuple(tokenizer.encode_chat(request.messages, request.tools))
        else:
            ids = tuple(tokenizer.encode(request.text))
    context = f"{request.model}\0{request.cache_salt}"
    if ids is not None:
        blocks, source = prints.blocks(ids, context), "tokens"
    elif request.text is not None:
        blocks, source = prints.text_blocks(request.text.encode("utf-8", "replace"), context), "bytes"
    else:
        blocks, source = [], "none"
    size = answer.input_tokens if answer.input_tokens is not None else None if ids is None else len(ids)
    out = answer.output_tokens
    if out is None and tokenizer is not None and answer.text:
        out = len(tokenizer.encode(answer.text, special=False))
    return size, out, blocks, source


def _choice_text(choice: Any) -> str:
    if not isinstance(choice, dict):
        return ""
    holder = choice.get("delta", choice.get("message"))
    if isinstance(holder, dict):
        parts = (holder.get("reasoning_content") or holder.get("reasoning"), holder.get("content"))
        calls = json.dumps(holder["tool_calls"]) if holder.get("tool_calls") else ""
        return "".join(part for part in parts if isinstance(part, str)) + calls
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any, default: int) -> int:
    return value if type(value) is int and abs(value) < 2**31 else default


def _known(value: Any, before: int | None) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else before
