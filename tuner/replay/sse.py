"""Reads the stamped bytes of one answer: tokens per chunk (from continuous usage), final usage, errors.

Server-sent events may be split anywhere, end in LF, CRLF or CR, and contain comments; one read may hold
several. An event gets the stamp of the read that completed it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
COMPLETION = b'"completion_tokens":'
CHOICES = b'"choices":'
NONE = re.compile(rb"\s*\[\s*\]")
DIGITS = re.compile(rb"\s*(\d+)")

# Events parsed between two pauses of `reader`.
SLICE = 16


@dataclass(slots=True)
class StreamedAnswer:
    """One parsed answer; stamps in nanoseconds of the wire's clock. `error` None = complete.

    `keep_ids` asks for the answered token ids in `ids`. `guessed` chunks carried text but no usage and were
    counted as one token each. `answer_ns` is the first chunk that is not reasoning. `engine` holds the
    engine's own per-request metrics where it sends them.
    """

    keep_ids: bool = False
    status: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    answer_ns: int | None = None
    finished: bool = False
    guessed: int = 0
    error: str | None = None
    engine: Mapping[str, float] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Completion tokens that came."""
        return sum(self.chunk_tokens)


def read(stamps: Sequence[int], parts: Sequence[bytes], choices: int = 1) -> StreamedAnswer:
    """Parse a complete answer at once. `choices` is the request's `n`."""
    answer = StreamedAnswer()
    for _ in reader(answer, stamps, parts, choices):
        pass
    return answer


def reader(
    answer: StreamedAnswer, stamps: Sequence[int], parts: Sequence[bytes], choices: int = 1
) -> Iterator[None]:
    """Parse into `answer`, yielding between batches of events so that the caller can attend to its clock."""
    start = _head(answer, parts)
    if start is None:
        answer.error = "no HTTP answer"
        return
    first, body, chunked = start
    if answer.status != 200:
        answer.error = _refusal(answer.status, _whole(body, parts[first + 1 :], chunked))
        return
    counts = [0] * choices
    framed, need, pending, seen = body, 0, b"", 0
    for number in range(first, len(parts)):
        if number > first:
            framed += parts[number]
        if chunked:
            piece, framed, need = _unchunk(framed, need)
        else:
            piece, framed = framed, b""
        events, pending = _events(pending + piece)
        stamp = stamps[number]
        for event in events:
            _event(answer, event, stamp, counts)
            seen += 1
            if not seen % SLICE:
                yield
    _conclude(answer, pending)


def status_and_body(parts: Sequence[bytes]) -> tuple[int, bytes]:
    """(HTTP status, body) of a complete answer; (0, b"") of none. ValueError when it is malformed."""
    answer = StreamedAnswer()
    start = _head(answer, parts)
    return (answer.status, _whole(start[1], parts[start[0] + 1 :], start[2])) if start else (0, b"")


def _head(answer: StreamedAnswer, parts: Sequence[bytes]) -> tuple[int, bytes, bool] | None:
    """Where the head ends: its part's number, what follows it there, and whether the body is chunked."""
    head = b""
    for number, part in enumerate(parts):
        head += part
        end = head.find(b"\r\n\r\n")
        if end >= 0:
            answer.status = int(head[:end].split(b" ", 2)[1])
            return number, head[end + 4 :], b"transfer-encoding: chunked" in head[:end].lower()
    return None


def _unchunk(framed: bytes, need: int = 0) -> tuple[bytes, bytes, int]:
    """(the bytes in the HTTP chunks, the rest of an unfinished size line, how many bytes the unfinished chunk
    still needs, with its line end).
    """
    pieces: list[bytes] = []
    position, end = 0, len(framed)
    while position < end:
        if need == 0:
            line = framed.find(b"\r\n", position)
            size = int(framed[position:line].partition(b";")[0], 16) if line >= 0 else 0
            if size == 0:
                break
            need, position = size + 2, line + 2
        stop = min(position + need, end)
        if need > 2:
            pieces.append(framed[position : min(stop, position + need - 2)])
        need -= stop - position
        position = stop
    return b"".join(pieces), framed[position:], need


def _events(body: bytes) -> tuple[list[bytes], bytes]:
    """The complete events, without their ends, and the rest of an unfinished one."""
    found = EVENT_END.split(body) if b"\r" in body else body.split(b"\n\n")
    return found, found.pop()


def _whole(body: bytes, parts: Sequence[bytes], chunked: bool) -> bytes:
    whole = body + b"".join(parts)
    return _unchunk(whole)[0] if chunked else whole


def _refusal(status: int, body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if isinstance(said, dict):
        inner = said.get("error", said)
        text = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return f"HTTP {status}: {text[:200].strip()}"


def _data(event: bytes) -> bytes:
    """The payload of an event: its data lines joined; comments and other fields dropped."""
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    lines = (line for line in re.split(rb"\r\n|\n|\r", event) if line.startswith(b"data:"))
    return b"\n".join(line[6:] if line[5:6] == b" " else line[5:] for line in lines)


def _event(answer: StreamedAnswer, event: bytes, stamp: int, counts: list[int]) -> None:
    data = _data(event)
    if not data or answer.error is not None:
        return
    if data == b"[DONE]":
        answer.finished = True
        return
    found = -1 if answer.keep_ids else data.rfind(COMPLETION)
    if found >= 0 and len(counts) == 1 and answer.answer_ns is not None and not _without_choices(data):
        digits = DIGITS.match(data, found + len(COMPLETION))
        if digits is not None:
            _count(answer, stamp, counts, 0, int(digits[1]))
            return
    _slow_event(answer, data, stamp, counts)


def _without_choices(data: bytes) -> bool:
    found = data.find(CHOICES) + len(CHOICES)
    return data[found : found + 2] != b"[{" and (found < len(CHOICES) or NONE.match(data, found) is not None)


def _slow_event(answer: StreamedAnswer, data: bytes, stamp: int, counts: list[int]) -> None:
    try:
        said = json.loads(data)
    except ValueError:
        answer.error = "malformed event"
        return
    if not isinstance(said, dict):
        answer.error = "malformed event"
    elif "error" in said:
        inner = said["error"]
        message = inner.get("message", inner) if isinstance(inner, dict) else inner
        answer.error = f"in-band error: {str(message)[:200]}"
    else:
        _chunk(answer, said, stamp, counts)


def _chunk(answer: StreamedAnswer, said: dict[str, object], stamp: int, counts: list[int]) -> None:
    usage = said.get("usage")
    choices = said.get("choices")
    if isinstance(usage, dict) and not choices:
        _final(answer, usage, said.get("metrics"))
        return
    if not isinstance(choices, list) or not choices:
        return
    choice = choices[0]
    delta = choice.get("delta") or choice
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    before = len(answer.chunk_ns)
    if answer.keep_ids and isinstance(choice.get("token_ids"), list):
        answer.ids.extend(choice["token_ids"])
    if isinstance(usage, dict) and "completion_tokens" in usage:
        _count(answer, stamp, counts, int(choice.get("index", 0)), int(usage["completion_tokens"]))
        answer.prompt_tokens = int(usage.get("prompt_tokens", answer.prompt_tokens or 0))
    elif reasoning or delta.get("text") or delta.get("content") or delta.get("tool_calls"):
        answer.guessed += 1
        answer.chunk_ns.append(stamp)
        answer.chunk_tokens.append(1)
    if answer.answer_ns is None and len(answer.chunk_ns) > before and not reasoning:
        answer.answer_ns = stamp


def _count(answer: StreamedAnswer, stamp: int, counts: list[int], index: int, total: int) -> None:
    if index >= len(counts):
        answer.error = f"unexpected choice {index}"
        return
    fresh = total - counts[index]
    if fresh > 0:
        counts[index] = total
        answer.chunk_ns.append(stamp)
        answer.chunk_tokens.append(fresh)


def _final(answer: StreamedAnswer, usage: dict[str, object], metrics: object) -> None:
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details")
    if isinstance(prompt, int):
        answer.prompt_tokens = prompt
    if isinstance(completion, int):
        answer.completion_tokens = completion
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        answer.cached_tokens = details["cached_tokens"]
    if isinstance(metrics, dict):
        answer.engine = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def _conclude(answer: StreamedAnswer, rest: bytes) -> None:
    """Set the error of an answer that ended too early; replace guessed token counts by the final usage."""
    if answer.error is None and not answer.finished:
        answer.error = "answer cut before [DONE]" if answer.chunk_ns or rest.strip() else "empty answer"
    if answer.error is None and answer.guessed and answer.completion_tokens is not None:
        missing = answer.completion_tokens - answer.tokens
        if answer.chunk_tokens and missing > 0:
            answer.chunk_tokens[-1] += missing
