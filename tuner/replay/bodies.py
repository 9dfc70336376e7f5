"""Request bodies, byte for byte a function of the trace, the salt and the load."""

import hashlib
import json

from tuner.replay.plan import Load
from tuner.traffic.prompts import Prompts, salt
from tuner.traffic.trace import Trace

PATH = "/v1/completions"


class Bodies:
    """Bodies of one trace for one (seed, number, repeat). `kind` "" is what is measured.

    Other kinds (warm-up, filler) have salts of their own: the same lengths and prefix structure, and not one
    block in common with what is measured. `priorities`: whether the engine takes a priority.
    """

    def __init__(self, trace: Trace, load: Load, *, priorities: bool = False) -> None:
        self.trace = trace
        self.load = load
        self._priorities = priorities
        self._salt = salt(load.seed, load.number, load.repeat)
        self._prompts: dict[str, Prompts] = {}
        self._head = f'{{"model":{json.dumps(load.model)},"prompt":'.encode()

    def prompts(self, kind: str = "") -> Prompts:
        """The prompts of a kind; one cache each."""
        found = self._prompts.get(kind)
        if found is None:
            own = (
                hashlib.blake2b(kind.encode(), key=self._salt, digest_size=16).digest()
                if kind
                else self._salt
            )
            found = self._prompts[kind] = Prompts(self.trace, self.load.vocabulary, own)
        return found

    def body(
        self, row: int, *, kind: str = "", tokens: int | None = None, prompt: bytes | None = None
    ) -> bytes:
        """The JSON body of a row. `tokens` overrides the recorded answer length, `prompt` the JSON."""
        choices = self.choices(row)
        length = self.answer(row) if tokens is None else tokens
        priority = int(self.trace.priority[row])
        tail = (
            f',"max_tokens":{length},"min_tokens":{length},"ignore_eos":true,"stream":true,'
            '"stream_options":{"include_usage":true,"continuous_usage_stats":true},'
        )
        if choices > 1:
            tail += f'"n":{choices},"temperature":1.0,"seed":{row}'
        else:
            tail += '"temperature":0.0'
        if self._priorities and priority:
            tail += f',"priority":{priority}'
        text = self.prompts(kind).token_json(row) if prompt is None else prompt
        return self._head + text + tail.encode() + b"}"

    def answer(self, row: int) -> int:
        """Tokens to ask for: as recorded, at least one."""
        return max(1, int(self.trace.output_len[row]))

    def choices(self, row: int) -> int:
        """The recorded `n`, at least one."""
        return max(1, int(self.trace.n[row]))
