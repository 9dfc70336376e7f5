"""An engine's log: secrets and prompts are removed before it is written; start-up phases are read from it."""

import re
from collections.abc import Callable, Iterable, Mapping
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
_KV_BLOCKS = re.compile(r"# (?:GPU|CPU|\S+) blocks: (\d+)")


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


def kv_tokens(text: str, block_size: int | None = None) -> int | None:
    """Size of the KV cache in tokens, from the log (old versions log blocks)."""
    if match := _KV_TOKENS.search(text):
        return int(match.group(1).replace(",", ""))
    if block_size and (match := _KV_BLOCKS.search(text)):
        return int(match.group(1)) * block_size
    return None


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
