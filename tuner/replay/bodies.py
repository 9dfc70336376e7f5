"""Request bodies, byte for byte a function of the trace, the salt and the load."""

import hashlib
import json
from dataclasses import dataclass

from tuner.replay.jobs import Job
from tuner.replay.plan import Load
from tuner.replay.schedule import cancel_after
from tuner.traffic.prompts import Prompts, salt
from tuner.traffic.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a job waits for: its parent's key (-1: nothing), think time, whether others wait for it."""

    parent: int = -1
    think_s: float = 0.0
    children: bool = False


ALONE = Turn()


class Bodies:
    """Request bodies of one trace for one (seed, number, repeat). Measured requests have the kind "".

    Other kinds (warm-up, filler) have salts of their own: the same lengths and shared prefixes, but no block
    in common with measured requests. `priorities`: whether the engine takes a priority.
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

    def job(
        self,
        key: int,
        row: int,
        at_s: float,
        *,
        kind: str = "",
        tokens: int | None = None,
        counted: bool = True,
        turn: Turn = ALONE,
    ) -> Job:
        """A row as a job. `tokens` overrides the recorded answer length (warm-up, priming)."""
        text = self.prompts(kind).token_json(row)
        choices = self.choices(row)
        live = self.load.history == "live"
        cancel_s = None
        if tokens is None and self.load.replay_cancellations:
            cancel_s = cancel_after(self.trace, row)
        length = self.answer(row) if cancel_s is None else self.unfinished(row)
        length = length if tokens is None else tokens
        return Job(
            key=key,
            row=row,
            at_s=at_s,
            body=self._head + text + self._tail(row, length, choices, ids=live and turn.children) + b"}",
            expected_input=int(self.trace.input_len[row]),
            expected_output=length * choices,
            choices=choices,
            counted=counted,
            cancel_s=cancel_s,
            deadline_s=self.load.deadline,
            parent=turn.parent,
            think_s=turn.think_s,
            children=turn.children,
            prompt=(len(self._head), len(self._head) + len(text)),
            delta=self._delta(row, turn) if live else b"",
        )

    def _tail(self, row: int, length: int, choices: int, *, ids: bool) -> bytes:
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
        if ids:
            tail += ',"return_token_ids":true'
        return tail.encode()

    def _delta(self, row: int, turn: Turn) -> bytes:
        """The ids that a turn adds to its parent's prompt and answer; none where it does not extend them."""
        if turn.parent < 0:
            return b""
        parent = int(self.trace.parent[row])
        covered = int(self.trace.input_len[parent]) + self.answer(parent)
        own = self.prompts().tokens(row)[covered:]
        return b",".join(b"%d" % one for one in own.tolist())

    def answer(self, row: int) -> int:
        """Tokens to ask for: as recorded, at least one."""
        return max(1, int(self.trace.output_len[row]))

    def unfinished(self, row: int) -> int:
        """Tokens to ask for where the client hung up: more than came by then, or the engine ends first."""
        enough = 4 * self.answer(row) + 256
        declared = int(self.trace.max_tokens[row])
        return min(declared, enough) if declared > 0 else enough

    def choices(self, row: int) -> int:
        """The recorded `n`, at least one."""
        return max(1, int(self.trace.n[row]))
