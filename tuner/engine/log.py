"""An engine's log. Secrets and prompts are removed before it is written. The times of the start-up phases
are read from it, and the root cause of the engine's end: the exception that ended it, and the process that
raised it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner import masking

_PROMPTS = (
    (re.compile(rb"\b(prompt: ).*?(, params: |$)", re.DOTALL), rb"\1[redacted]\2"),
    (re.compile(rb"(prompt_token_ids: )\[[^\]]*\]"), rb"\1[redacted]"),
)
_PHASES = (
    ("weights_s", re.compile(r"Loading weights took ([\d.]+) s")),
    ("model_s", re.compile(r"Model loading took [\d.]+ G(?:i)?B(?: memory)? and ([\d.]+) s")),
    ("model_s", re.compile(r"Initializing model took ([\d.]+) s")),
    ("compile_s", re.compile(r"torch\.compile (?:takes|took) ([\d.]+) s")),
    ("warmup_s", re.compile(r"warmup run took ([\d.]+) s")),
    ("capture_s", re.compile(r"Graph capturing finished in ([\d.]+) s")),
    ("init_s", re.compile(r"init engine \(.*?\) took ([\d.]+) s")),
)
_MARKS = (
    ("imports_s", re.compile(r"Initializing a V\d LLM engine|Initializing an? LLM engine")),
    ("serving_s", re.compile(r"Starting vLLM (?:API )?server")),
)
_CLOCK = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")


def redactor(env: Mapping[str, str]) -> Callable[[bytes], bytes]:
    """A filter for log lines that removes prompts and secrets, also those of `env`."""
    without_secrets = masking.redactor(env)

    def redact(line: bytes) -> bytes:
        for pattern, replacement in _PROMPTS:
            line = pattern.sub(replacement, line)
        return without_secrets(line)

    return redact


def read(path: Path) -> str:
    """The text of a log, colours taken out; empty when there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def timeline(text: str) -> dict[str, float]:
    """Seconds per start-up phase: `weights_s model_s compile_s warmup_s capture_s init_s` as the engine logs
    them, `imports_s` and `serving_s` from the first stamp in the log to that line. Phases that it does not
    log are left out.
    """
    found: dict[str, float] = {}
    for name, pattern in _PHASES:
        if (match := pattern.search(text)) and name not in found:
            found[name] = float(match.group(1))
    lines = text.splitlines()
    start = next((stamp for line in lines if (stamp := _seconds(line)) is not None), None)
    if start is not None:
        found.update(_marks(lines, start))
    return found


def kv_tokens(text: str) -> int | None:
    """Size of the KV cache in tokens, from the log."""
    match = _KV_TOKENS.search(text)
    return int(match.group(1).replace(",", "")) if match else None


def _marks(lines: Iterable[str], start: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines:
        for name, pattern in _MARKS:
            stamp = _seconds(line)
            if name not in found and stamp is not None and pattern.search(line):
                found[name] = (stamp - start) % 86400.0
    return found


def _seconds(line: str) -> float | None:
    match = _CLOCK.search(line)
    if match is None:
        return None
    _, _, hours, minutes, seconds = (int(part) for part in match.groups())
    return hours * 3600.0 + minutes * 60.0 + seconds


# At most so many characters of a line are kept.
MOST = 500

# Lines after an exception's first one that may belong to its message.
FOLLOWING = 12

# A message whose first line is shorter than this is shown with its next line.
SHORT = 60

_LINE = re.compile(
    r"^(?:[\w.-]+\s+\|\s)?(?:\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s+)?"
    r"(?P<names>(?:\([\w .:-]+ pid=\d+[^)]*\) ?)*)(?:\[rank\d+\]: ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\s+(?:\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?\s+)?"
    r"\[?[\w./-]+:\d+\] ?)?(?P<text>.*)$"
)
_EXCEPTION = re.compile(
    r"^(?:[\w]+\.)*[A-Z]\w*(?:Error|Exception|Failure|Fault|Timeout|Interrupt)(?::(?=\s)|$)|^Value error, "
)
_FATAL = re.compile(
    r"^(?:WorkerProc|EngineCore|Worker|Engine process)\b.*\b(?:failed to start|hit an exception"
    r"|encountered a fatal error)"
)
_CHAINED = re.compile(r"^(?:The above exception was the direct cause|During handling of the above exception)")
_WRAPPER = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|Worker failed with error"
    r"|Engine process failed to start|EngineDeadError|EngineGenerateError|MQEngineDeadError|already dead"
    r"|See (?:root cause|stack trace) (?:above|for)|^SystemExit|^KeyboardInterrupt|CancelledError"
)
_CONSEQUENCE = re.compile(
    r"[Cc]onnection (?:closed|reset) by peer|BrokenPipeError|ConnectionResetError|EOFError|: cancelled$"
    r"|DistStoreError|destroy_process_group|died unexpectedly"
)
_QUOTED = re.compile(r"Worker failed with error '(.*)', please check the stack trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a log without what the logger and the container put in front of it."""

    process: str
    level: str
    text: str

    @property
    def quiet(self) -> bool:
        """Whether it only informs or warns: the engine went on after it."""
        return self.level in ("DEBUG", "INFO", "WARNING") or "Warning: " in self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """`line` is the cause in one sentence; `words` are the messages of all exceptions that led to it."""

    line: str
    words: str


def split(text: str) -> list[Line]:
    """The lines of a log, each with its process and its level (empty if the line names none)."""
    found = []
    for raw in text.splitlines():
        match = _LINE.match(raw)
        assert match is not None, "the pattern matches every line"
        names = re.findall(r"\(([\w .:-]+?) pid=", match["names"])
        found.append(Line(process=names[-1] if names else "", level=match["level"] or "", text=match["text"]))
    return found


def root_cause(text: str) -> RootCause | None:
    """The root cause of an engine's end by its log; None if the log has no exception.

    It is the first exception after a process logged that it failed to start; else the first one of the
    innermost process (worker, then engine core, then server). Errors that only repeat another process's
    error, or that follow when another process is gone, count only if there are no others.
    """
    lines = [line for line in split(text) if not line.quiet]
    processes = sorted({line.process for line in lines}, key=_depth)
    chains = [chain for name in processes for chain in _chains([x for x in lines if x.process == name])]
    marked = [chain for chain in chains if chain.marked]
    for wanted in (marked, chains):
        own = [chain for chain in wanted if chain.own]
        if own:
            return own[0].told()
    return chains[0].told() if chains else _logged(lines)


def _depth(process: str) -> int:
    """The innermost process first."""
    name = process.lower()
    return 0 if "worker" in name else 1 if "engine" in name else 2 if not name else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Exceptions that Python chained: each led to the next."""

    messages: tuple[tuple[str, ...], ...]
    marked: bool

    @property
    def own(self) -> bool:
        """Whether it contains more than the failure of another process."""
        return any(not secondary(message[0]) for message in self.messages)

    def told(self) -> RootCause:
        firsts = [m for m in self.messages if not secondary(m[0])] or list(self.messages)
        words = "\n".join(_plain(line) for message in self.messages for line in message)
        return RootCause(line=_sentence(firsts[-1]), words=words)


def secondary(line: str) -> bool:
    """Whether a line only repeats another process's error, or follows from its end."""
    return _WRAPPER.search(line) is not None or _CONSEQUENCE.search(line) is not None


def _chains(lines: Sequence[Line]) -> list[_Chain]:
    """The chains of exceptions in one process's lines, in order."""
    found: list[_Chain] = []
    marked = False
    for number, line in enumerate(lines):
        marked = marked or _FATAL.search(line.text) is not None
        if _EXCEPTION.search(line.text) is None:
            continue
        message = _message(lines[number : number + FOLLOWING])
        if found and _continues(lines, number):
            found[-1] = _Chain(messages=(*found[-1].messages, message), marked=found[-1].marked)
        else:
            found.append(_Chain(messages=(message,), marked=marked))
    return found


def _continues(lines: Sequence[Line], number: int) -> bool:
    """Whether the exception at a line was raised because of, or while handling, the one before it."""
    for line in reversed(lines[:number]):
        if _CHAINED.search(line.text):
            return True
        if _EXCEPTION.search(line.text):
            return line.text.endswith("Config") or lines[number].text.startswith("Value error")
    return False


def _message(lines: Sequence[Line]) -> tuple[str, ...]:
    """An exception's own lines: the first, and those up to the next traceback."""
    kept = [lines[0].text.strip()]
    for line in lines[1:]:
        text = line.text.strip()
        if text.startswith(("Traceback", "File ")) or _CHAINED.search(text) or _EXCEPTION.search(line.text):
            break
        if text and not text.startswith(("For further information", "^")):
            kept.append(text)
    return tuple(kept)


def _sentence(message: Sequence[str]) -> str:
    """A message in one line: what follows a short first line, or says what is invalid, belongs to it."""
    first = _QUOTED.sub(r"\1", message[0])
    more = 2 if "validation error" in first else 1 if len(first) < SHORT else 0
    whole = " ".join([first, *message[1 : 1 + more]])
    return _plain(whole)[:MOST]


def _plain(line: str) -> str:
    """A line of a validation error without what was given, which repeats every argument."""
    return re.sub(r"\s*\[type=\w+, .*$", "", line)


def _logged(lines: Sequence[Line]) -> RootCause | None:
    """The first error that a logger wrote without the name of an exception (engines before 0.8)."""
    for line in sorted(lines, key=lambda each: _depth(each.process)):
        text = line.text.strip()
        loud = line.level in ("ERROR", "CRITICAL", "FATAL") and line.text[:1].strip()
        general = text.startswith(("Traceback", "File ")) or _FATAL.search(text) or secondary(text)
        if loud and not general:
            return RootCause(line=text[:MOST], words=text)
    return None
