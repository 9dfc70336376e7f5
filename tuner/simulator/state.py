"""What goes through the core: the limits it obeys, requests, and steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tuner.simulator.blocks import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler obeys; the names are vLLM's.

    `swap_blocks` > 0: preempted requests keep so many blocks in host memory (V0's swap, today's offload).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    watermark: float = 0.0
    async_scheduling: bool = True
    swap_blocks: int = 0

    @property
    def active(self) -> int:
        return self.max_num_active_seqs or self.max_num_seqs


class Request:
    """One request inside the engine. Token counts are lazy while it decodes: see `Scheduler.tokens_of`."""

    __slots__ = (
        *("arrival", "base", "cached", "computed", "done", "first", "last", "made", "number"),
        *("output", "preempted", "priority", "prompt", "scheduled", "swapped", "table", "tokens"),
    )

    def __init__(
        self,
        number: int,
        arrival: float,
        lengths: tuple[int, int],
        segments: Sequence[tuple[int, int]] = (),
        priority: int = 0,
    ) -> None:
        self.number = number
        self.arrival = arrival
        self.prompt, self.output = lengths
        self.priority = priority
        self.table = Table(segments)
        self.computed = 0
        self.made = 0
        self.tokens = self.prompt
        self.base = -1  # the tick at which decoding began, -1 while it does not
        self.cached = -1  # prompt tokens found in the prefix cache when first admitted, -1 before
        self.preempted = 0
        self.swapped = 0  # blocks held in host memory
        self.done = False
        self.scheduled = self.first = self.last = -1.0

    @property
    def rank(self) -> tuple[int, float, int]:
        return (self.priority, self.arrival, self.number)


@dataclass(slots=True)
class Step:
    """One engine step: what it computes, and who gets a first token or the last one from it."""

    decodes: int = 0
    prefill_tokens: int = 0
    prefills: int = 0
    context: int = 0  # tokens of KV read by decodes
    prefill_context: int = 0  # tokens of KV read by prompt chunks
    pairs: int = 0  # query × key pairs of prompt chunks
    swapped_blocks: int = 0
    preempted: bool = False
    sampling: list[Request] = field(default_factory=list)  # whose prompt is complete with this step
    finishing: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    members: tuple[Request, ...] = ()  # decoding requests, only when the scheduler is told to tell

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    @property
    def steady(self) -> bool:
        """A pure decode step after which nothing changes."""
        return not (self.prefills or self.finishing or self.preempted)
