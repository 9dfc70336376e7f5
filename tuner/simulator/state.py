"""The scheduler's data: its limits, requests, steps, and the paged KV memory with its prefix cache.

Content is stored as runs of blocks (`BlockRun`) instead of single blocks: a prefix of a run is all that stays
cached, because a request frees its blocks from the last to the first, and the least recently freed are
evicted first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


class BlockRun:
    """A run of up to `size` blocks of one content; `cached` of them exist, `refs` requests hold it."""

    __slots__ = ("cached", "key", "refs", "size")

    def __init__(self, key: int | None, size: int) -> None:
        self.key = key
        self.size = size
        self.cached = 0
        self.refs = 0


class BlockTable:
    """The block table of one request: `segments` are (content key, blocks) of its prompt's shared part, of
    which the first `whole` are remembered to their ends and held by it.
    """

    __slots__ = ("blocks", "nodes", "segments", "shared", "tail", "whole", "whole_blocks")

    def __init__(self, segments: Sequence[tuple[int, int]] = ()) -> None:
        self.segments = segments
        self.nodes: list[BlockRun] = []
        self.blocks = 0
        self.shared = 0
        self.whole = self.whole_blocks = 0
        self.tail: BlockRun | None = None


class BlockPool:
    """`total` blocks of `block_size` tokens. With `caching` off nothing is remembered."""

    def __init__(self, total: int, block_size: int, caching: bool) -> None:
        self.total = total
        self.block_size = block_size
        self.caching = caching
        self.plain = total
        self.idle = 0
        self._lru: dict[BlockRun, None] = {}
        self._nodes: dict[int, BlockRun] = {}

    @property
    def free(self) -> int:
        """Blocks that no request holds, remembered ones included."""
        return self.plain + self.idle

    @property
    def usage(self) -> float:
        return 1.0 - (self.plain + self.idle) / self.total if self.total else 0.0

    def lookup(self, table: BlockTable, limit: int) -> tuple[int, list[BlockRun]]:
        """(how many leading blocks are cached, at most `limit`; the runs that contain them)."""
        found: list[BlockRun] = []
        got = 0
        if not self.caching:
            return 0, found
        for key, size in table.segments:
            node = self._nodes.get(key)
            if node is None or (use := min(node.cached, size, limit - got)) <= 0:
                return got, found
            found.append(node)
            got += use
            if use < size:
                return got, found
        if table.tail is not None and table.tail.cached:
            use = min(table.tail.cached, limit - got)
            if use > 0:
                found.append(table.tail)
                got += use
        return got, found

    def cost_of(self, found: Sequence[BlockRun]) -> int:
        """Free blocks that taking hold of these runs would use up."""
        return sum(node.cached for node in found if node.refs == 0)

    def hold(self, table: BlockTable, hit: int, found: Sequence[BlockRun]) -> None:
        """Start the table with `hit` remembered blocks."""
        for node in found:
            if node.refs == 0:
                del self._lru[node]
                self.idle -= node.cached
            node.refs += 1
        table.nodes = list(found)
        table.blocks = hit
        table.shared = hit

    def take(self, count: int) -> None:
        """Hand out blocks; when no plain block is left, the least recently used content is evicted."""
        if count <= self.plain:
            self.plain -= count
            return
        count -= self.plain
        self.plain = 0
        while count:
            node = next(iter(self._lru))
            some = min(count, node.cached)
            node.cached -= some
            self.idle -= some
            count -= some
            if not node.cached:
                del self._lru[node]
                if node.key is not None:
                    self._nodes.pop(node.key, None)

    def remember(self, table: BlockTable, full: int) -> None:
        """Put the shared part of a prompt into the cache. Its first `full` blocks are computed by the end of
        this step.
        """
        start, nodes = table.whole_blocks, table.nodes
        for index in range(table.whole, len(table.segments)):
            key, size = table.segments[index]
            done = min(full - start, size)
            if done <= 0:
                return
            node, held = self._nodes.get(key), len(nodes)
            if node is None:
                if index != held:
                    return
                node = self._nodes[key] = BlockRun(key, size)
            mine = index < held and nodes[index] is node
            if not mine and index == held and (node.refs > 0 or not node.cached):
                node.refs += 1
                nodes.append(node)
                mine = True
            if mine and done > node.cached:
                table.shared += done - node.cached
                node.cached = done
            start += size
            if mine and node.cached == size and index == table.whole:
                table.whole, table.whole_blocks = index + 1, start

    def release(self, table: BlockTable, computed: int) -> None:
        """Free all blocks; complete blocks of computed tokens stay cached until they are evicted."""
        self.plain += table.blocks - table.shared
        if self.caching:
            self._keep_tail(table, computed)
        for node in reversed(table.nodes):
            node.refs -= 1
            if node.refs == 0:
                if node.cached:
                    self._lru[node] = None
                    self.idle += node.cached
                elif node.key is not None:
                    self._nodes.pop(node.key, None)
        table.nodes = []
        table.blocks = table.shared = table.whole = table.whole_blocks = 0

    def _keep_tail(self, table: BlockTable, computed: int) -> None:
        """Cache the request's own complete blocks, which follow its shared part, as a run."""
        prefix = sum(size for _, size in table.segments) if table.segments else 0
        own = computed // self.block_size - prefix
        held = table.tail is not None and table.tail in table.nodes
        tail = table.tail if held and table.tail is not None else BlockRun(None, 0)
        fresh = min(own - tail.cached, table.blocks - table.shared)
        if fresh <= 0:
            return
        tail.cached += fresh
        tail.size = tail.cached
        self.plain -= fresh
        if not held:
            tail.refs = 1
            table.nodes.append(tail)
            table.tail = tail

    def forget(self) -> bool:
        """Empty the prefix cache; False while any request holds blocks, as the engine answers."""
        if self.free != self.total:
            return False
        self.plain, self.idle = self.total, 0
        for node in self._lru:
            node.cached = 0
        self._lru.clear()
        self._nodes.clear()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The scheduler's limits, under vLLM's names. `swap_blocks` > 0: preempted requests keep so many blocks
    in host memory (V0's swap, today's offload).
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


class EngineRequest:
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
        self.table = BlockTable(segments)
        self.computed = 0
        self.made = 0
        self.tokens = self.prompt
        self.base = -1  # the tick at which decoding began, -1 while it does not
        self.cached = -1  # prompt tokens found in the prefix cache when first admitted, -1 before
        self.preempted = 0
        self.swapped = 0  # blocks in host memory
        self.done = False
        self.scheduled = self.first = self.last = -1.0

    @property
    def rank(self) -> tuple[int, float, int]:
        return (self.priority, self.arrival, self.number)


@dataclass(slots=True)
class Step:
    """One engine step: what it computes, and which requests get their first or last token from it."""

    decodes: int = 0
    prefill_tokens: int = 0
    prefills: int = 0
    context: int = 0  # tokens of KV read by decodes
    prefill_context: int = 0  # tokens of KV read by prompt chunks
    pairs: int = 0  # query × key pairs of prompt chunks
    swapped_blocks: int = 0
    preempted: bool = False
    sampling: list[EngineRequest] = field(default_factory=list)  # whose prompt is complete with this step
    finishing: list[EngineRequest] = field(default_factory=list)
    admitted: list[EngineRequest] = field(default_factory=list)
    members: tuple[EngineRequest, ...] = ()  # decoding requests, only in a scheduler with `tell`

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    @property
    def steady(self) -> bool:
        """A pure decode step after which nothing changes."""
        return not (self.prefills or self.finishing or self.preempted)
