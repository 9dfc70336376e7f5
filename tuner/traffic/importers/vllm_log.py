"""vLLM's request log. Its time stamps have steps of 1 s and no year. It has prompt lengths only if it was
written at DEBUG.
"""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tuner.errors import BadInput
from tuner.measures import many
from tuner.traffic.exchange import TOKEN_BLOCK, Fingerprints
from tuner.traffic.importers import FileStart, Importer, register
from tuner.traffic.importers.reading import lines
from tuner.traffic.importers.stamps import guess_year, parse_stamp
from tuner.traffic.importers.trace_builder import ImportOptions, Row, TraceBuilder
from tuner.traffic.trace import Trace

_LINE = re.compile(r"(?:INFO|DEBUG) (\d\d-\d\d) (\d\d:\d\d:\d\d) ")

# Names are within the first characters of a line; long contents follow, which are searched from their end.
_HEAD = 4096
_RECEIVED = re.compile(r"Received request (\S+): ")
_DETAILS = re.compile(r"Request (\S+) details: ")
_PROMPT_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\], prompt_embeds")
_TOKENS = re.compile(r"Generated response (\S+?)(?: \([^()]*\))? details: output_token_ids: \[")
_IDS = re.compile(r"([\d, ]*)\]")
_DONE = re.compile(r"Generated response (\S+?)(?: \([^()]*\))?: output: ")
_REASON = re.compile(r"finish_reason: (\w+)")
_NUMBER = re.compile(r"\b(n|max_tokens|beam_width)=(\d+)")
_ADAPTER = re.compile(r"lora_name='([^']*)'")


@dataclass(slots=True)
class _Seen:
    """What the log shows of one request so far."""

    at_ns: int = 0
    received: bool = False
    ids: list[int] | None = None
    output: int | None = None
    max_tokens: int = -1
    n: int = 1
    beam: int = 0
    lora: str | None = None
    end_ns: int | None = None
    blocks: list[int] = field(default_factory=list)


def read(path: Path, options: ImportOptions) -> Trace:
    """The requests of `--enable-log-requests`. Requests without a prompt length are counted and left out.

    If the log does not count the tokens of an answer, the answer is assumed to have max_tokens tokens, and
    this is counted. BadInput if no request has a length.
    """
    builder = TraceBuilder(path, options, block_size=TOKEN_BLOCK)
    prints, seen = Fingerprints(), dict[str, _Seen]()
    clock = _Clock(datetime.fromtimestamp(path.stat().st_mtime, UTC))
    for number, text, ended in lines(path):
        try:
            _take(text, clock, seen, prints)
        except ValueError as error:
            if ended:
                raise BadInput(
                    f"{path}: line {number}: not a time stamp or a list of tokens: {error}"
                ) from error
            builder.quality["cut_last_line"] += 1
    prints.destroy()
    for name, one in seen.items():
        _add(builder, name, one)
    if not len(builder):
        raise BadInput(
            f"{path}: the log has {many(len(seen), 'request')}, but no prompt lengths. vLLM logs lengths"
            " only at DEBUG (VLLM_LOGGING_LEVEL=DEBUG). `tuner capture` records lengths without the text"
        )
    return builder.trace("vllm-log", known_step_s=1.0, year_guessed=True)


class _Clock:
    """Time stamps without a year. The first gets the newest year that is possible. When the months begin
    again, the year increases by one.
    """

    def __init__(self, newest: datetime) -> None:
        self._newest, self._year, self._month = newest, 0, 0

    def read(self, day: str, time: str) -> int:
        month = int(day[:2])
        if not self._year:
            self._year = guess_year(day, self._newest)
        elif month < self._month - 6:
            self._year += 1
        self._month = month
        found = parse_stamp(f"{self._year:04d}-{day} {time}")
        if found is None:
            raise ValueError(f"'{day} {time}'")
        return found


def _take(text: str, clock: _Clock, seen: dict[str, _Seen], prints: Fingerprints) -> None:
    if "Received request" not in text and "Request " not in text and "Generated response" not in text:
        return
    head = text[:_HEAD]
    stamp = _LINE.search(head)
    at = clock.read(stamp.group(1), stamp.group(2)) if stamp else None
    if (found := _DETAILS.search(head)) and (ids := _last(text, _PROMPT_IDS, "prompt_token_ids: [")):
        one = seen.setdefault(found.group(1), _Seen())
        one.ids = _ids(ids.group(1))
        one.blocks = prints.blocks(one.ids)
    elif (found := _RECEIVED.search(head)) and at is not None:
        _received(seen, found.group(1), text, at)
    elif (found := _TOKENS.search(head)) and (ids := _IDS.match(text, found.end())):
        one = seen.setdefault(found.group(1), _Seen())
        one.output = (one.output or 0) + len(_ids(ids.group(1)))
        one.end_ns = at
    elif found := _DONE.search(head):
        reason = _last(text, _REASON, "finish_reason: ")
        if reason is not None and reason.group(1) != "None":
            seen.setdefault(found.group(1), _Seen()).end_ns = at


def _received(seen: dict[str, _Seen], name: str, text: str, at_ns: int) -> None:
    """A received request. The parameters follow the prompt, and the adapter follows both. So the last place
    of each word is the right one.
    """
    before, word, adapter = text.rpartition("lora_request: ")
    params = before[max(before.rfind("params: SamplingParams("), before.rfind("params: BeamSearchParams(")) :]
    if not word or not params.startswith("params: "):
        return
    one = seen.setdefault(name, _Seen())
    one.at_ns, one.received = at_ns, True
    numbers = {word: int(value[:9]) for word, value in _NUMBER.findall(params)}
    one.beam, one.max_tokens = numbers.get("beam_width", 0), numbers.get("max_tokens", -1)
    one.n = numbers.get("n", max(1, one.beam))
    found = _ADAPTER.search(adapter)
    one.lora = found.group(1) if found else None


def _last(text: str, pattern: re.Pattern[str], beginning: str) -> re.Match[str] | None:
    """The pattern at the last place where `beginning` occurs."""
    place = text.rfind(beginning)
    return None if place < 0 else pattern.match(text, place)


def _add(builder: TraceBuilder, name: str, one: _Seen) -> None:
    if not one.received or one.ids is None:
        builder.drop("dropped_no_length" if one.received else "dropped_no_arrival")
        return
    output = one.output
    if output is None:
        builder.quality["output_len_from_max_tokens"] += 1
        output = max(1, one.max_tokens)
    builder.add(
        Row(
            arrival=one.at_ns,
            input_len=len(one.ids),
            output_len=output,
            max_tokens=one.max_tokens,
            n=max(1, one.n),
            beam=one.beam,
            lora=one.lora,
            key=name,
            obs_e2e_s=float("nan") if one.end_ns is None else max(0, one.end_ns - one.at_ns) / 1e9,
            blocks=one.blocks,
        )
    )


def _ids(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one.strip()]


def _fits(start: FileStart) -> bool:
    """Whether this is a log that names requests (a log never begins like JSON)."""
    marks = ("Received request ", "Generated response ")
    return start.text[0] not in "{[" and any(mark in start.text for mark in marks)


register(Importer(format="vllm-log", read=read, fits=_fits))
