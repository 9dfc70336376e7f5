"""The scheduler of a vLLM V1 engine as a discrete-event core: which tokens of which requests go into a step.

Its rules are those of vLLM 0.32's scheduler. Running requests come before waiting ones. A step has one token
budget, and prompts are cut to fit it; `long_prefill_token_threshold` applies only when more than one request
is present. A waiting request needs room for its whole prompt; the watermark counts only when other requests
run. A preemption hits the request admitted last (or of the lowest priority), which starts over; a step that
preempts admits nothing.

Decoding requests are not updated in every step: one `tick` counts decode steps for all of them, so a stretch
of pure decode steps costs the same as one (`advance`).
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence

from tuner.simulator.state import BlockPool, BlockRun, EngineRequest, SchedulerLimits, Step


class Scheduler:
    """All requests of an engine: `schedule()`, then `complete(step)`; async scheduling is one step ahead.

    One of the blocks is never handed out: vLLM keeps it as its null block.
    """

    def __init__(self, limits: SchedulerLimits, *, tell: bool = False) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks - 1, limits.block_size, limits.enable_prefix_caching)
        self.watermark = int(limits.watermark * limits.num_blocks)
        self.waiting: deque[EngineRequest] = deque()
        self.running: dict[EngineRequest, None] = {}
        self.prefilling: dict[EngineRequest, None] = {}
        self.decoding: dict[EngineRequest, None] = {}
        self.draining: set[EngineRequest] = set()
        self.tick = 0
        self.context = 0
        self.preemptions = self.queries = self.hits = self.most_running = 0
        self.swap_free = limits.swap_blocks
        self._tell = tell
        self._phase = [0] * limits.block_size
        self._ends: list[tuple[int, int, EngineRequest]] = []
        self._blocked: EngineRequest | None = None  # found no room; pure decode steps make none

    # ---- requests come and go

    def add(self, request: EngineRequest) -> None:
        room = self.limits.max_model_len - request.prompt
        request.output = max(1, min(request.output, room)) if room > 0 else 1
        self._enqueue(request, front=False)

    def _enqueue(self, request: EngineRequest, *, front: bool) -> None:
        if self.limits.policy == "priority":
            ordered = list(self.waiting)
            insort(ordered, request, key=lambda r: r.rank)
            self.waiting = deque(ordered)
        elif front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def abort(self, request: EngineRequest) -> None:
        """Drop a request in any state and free what it holds."""
        if request.done:
            return
        request.done, self._blocked = True, None
        if request in self.running:
            self._leave(request)
            self.pool.release(request.table, request.computed)
            del self.running[request]
        elif request in self.waiting:
            self.waiting.remove(request)
            self.swap_free += request.swapped

    def complete(self, step: Step) -> None:
        """The step has been computed: free the blocks of its finished requests."""
        for request in step.finishing:
            if request.done or request not in self.draining:
                continue
            self.draining.discard(request)
            self.pool.release(request.table, request.computed)
            del self.running[request]
            request.done, self._blocked = True, None

    def tokens_of(self, request: EngineRequest) -> tuple[int, int]:
        """(computed, made) of a request as of the steps scheduled so far."""
        ahead = self.tick - request.base if request.base >= 0 else 0
        return request.computed + ahead, request.made + ahead

    # ---- decode bookkeeping

    def _start_decoding(self, request: EngineRequest) -> None:
        request.base = self.tick
        self.decoding[request] = None
        self._phase[(self.tick - request.computed) % self.limits.block_size] += 1
        self.context += request.computed
        heapq.heappush(self._ends, (self.tick + request.output - request.made, request.number, request))

    def _leave(self, request: EngineRequest) -> None:
        """Take a request out of whichever set it is in and make its counts exact."""
        self.prefilling.pop(request, None)
        self.draining.discard(request)
        if request.base < 0:
            return
        del self.decoding[request]
        self._phase[(request.base - request.computed) % self.limits.block_size] -= 1
        ahead = self.tick - request.base
        request.computed += ahead
        request.made += ahead
        request.base = -1
        request.table.blocks = -(-request.computed // self.limits.block_size)
        self.context -= request.computed

    def next_end(self) -> int:
        """The tick at which the next decoding request has all its tokens; huge when none decodes."""
        while self._ends:
            tick, _, request = self._ends[0]
            if request.base >= 0 and request.base + request.output - request.made == tick:
                return tick
            heapq.heappop(self._ends)
        return 1 << 60

    def _blocks_ahead(self, count: int) -> int:
        """Blocks that `count` further decode steps need."""
        size = self.limits.block_size
        rounds, rest = divmod(count, size)
        need = rounds * len(self.decoding)
        at = self.tick % size
        phase = self._phase
        return need + (sum(phase[at : at + rest]) + sum(phase[: max(0, at + rest - size)]) if rest else 0)

    @property
    def slots_full(self) -> bool:
        return len(self.running) >= self.limits.active

    def still(self) -> bool:
        """Whether the next steps are pure decode until a request arrives or ends."""
        if not self.decoding or self.prefilling:
            return False
        return not self.waiting or self.waiting[0] is self._blocked or self.slots_full

    def advance(self, most: int) -> int:
        """Schedule up to `most` pure decode steps at once, none of which ends a request. Returns how many."""
        count, need = min(most, self.next_end() - self.tick - 1), 0
        while count > 0 and (need := self._blocks_ahead(count)) > self.pool.free:
            count = min(count - 1, count * max(self.pool.free, 0) // max(need, 1))
        if count > 0:
            self.pool.take(need)
            self.tick += count
            self.context += count * len(self.decoding)
        return max(count, 0)

    def pure_step(self) -> Step:
        """The last of the steps that `advance` scheduled, which is still to be computed."""
        members = tuple(self.decoding) if self._tell else ()
        return Step(decodes=len(self.decoding), context=self.context, members=members)

    # ---- one step

    def schedule(self) -> Step | None:
        """Choose the next step's tokens, as of what has arrived; None when there is nothing to compute.

        A step can become empty because its only request was preempted; then the next step is chosen.
        """
        step = self._choose()
        if step.decodes or step.prefill_tokens:
            return step
        left = False
        while step.preempted and not step.tokens and not step.swapped_blocks:
            step, left = self._choose(), True
        step.preempted |= left
        return step if step.tokens or step.swapped_blocks else None

    def _choose(self) -> Step:
        step = Step()
        budget = self.limits.max_num_batched_tokens
        threshold = self._threshold() if self.limits.long_prefill_token_threshold > 0 else 0
        if self._roomy(budget, threshold):
            if need := self._phase[self.tick % self.limits.block_size]:
                self.pool.take(need)
            budget -= self._step_decodes(step)
            if self.prefilling:
                budget = self._schedule_prefills(step, budget, threshold)
        else:
            budget = self._schedule_in_order(step, budget, threshold)
        if self.waiting and self.waiting[0] is not self._blocked and not step.preempted:
            self._schedule_waiting(step, budget, threshold)
        for request in step.sampling:
            self._sampled(request, step)
        return step

    def _threshold(self) -> int:
        """The most tokens of one prompt in this step, 0 = no limit beside the budget."""
        limits = self.limits
        most = limits.long_prefill_token_threshold
        if (present := len(self.running) + len(self.waiting)) <= 1:
            return 0
        if limits.long_prefill_token_threshold_adaptive:
            most = max(most, limits.max_num_batched_tokens // present)
        return most

    def _roomy(self, budget: int, threshold: int) -> bool:
        """Whether all running requests get their blocks, so that their order does not matter."""
        size = self.limits.block_size
        need = self._phase[self.tick % size]
        budget -= len(self.decoding)
        for request in self.prefilling:
            chunk = min(request.tokens - request.computed, threshold or budget, budget)
            more = -(-(request.computed + chunk) // size) - request.table.blocks
            if more > 0:
                need += more
            budget -= chunk
        return need <= self.pool.plain + self.pool.idle

    def _step_decodes(self, step: Step) -> int:
        """One token for every decoding request; its block has been taken."""
        count = len(self.decoding)
        if not count:
            return 0
        if self._tell:
            step.members = tuple(self.decoding)
        self.context += count
        step.decodes, step.context = count, self.context
        self.tick += 1
        while self._ends and self._ends[0][0] <= self.tick and self.next_end() == self.tick:
            request = heapq.heappop(self._ends)[2]
            self._leave(request)
            self.draining.add(request)
            step.finishing.append(request)
        return count

    def _schedule_prefills(self, step: Step, budget: int, threshold: int) -> int:
        for request in tuple(self.prefilling):
            if budget <= 0:
                break
            chunk = request.tokens - request.computed
            if chunk > budget or threshold:
                chunk = min(chunk, threshold or budget, budget)
            self._grow(request, chunk)
            self._compute(request, chunk, step)
            budget -= chunk
        return budget

    def _schedule_in_order(self, step: Step, budget: int, threshold: int) -> int:
        """Where blocks are scarce: in the order of admission, and each preempts others until it fits."""
        size = self.limits.block_size
        given: dict[EngineRequest, int] = {}  # tokens of this step
        extra: set[EngineRequest] = set()  # decodes that took a block
        for request in tuple(self.running):
            if budget <= 0:
                break
            if request not in self.running or request in self.draining:
                continue
            decodes = request.base >= 0
            chunk = 1 if decodes else min(request.tokens - request.computed, threshold or budget, budget)
            need = int(decodes and (request.computed + self.tick - request.base) % size == 0)
            while request in self.running and not (
                not need or self._take(need) if decodes else self._grow(request, chunk)
            ):
                victim = self._victim()
                if victim in extra:
                    self.pool.plain += 1
                self._preempt(victim, step)
                budget += given.pop(victim, 0)
            if request not in self.running:
                break
            given[request] = chunk
            budget -= chunk
            if decodes and need:
                extra.add(request)
        self._settle(step, given)
        return budget

    def _settle(self, step: Step, given: dict[EngineRequest, int]) -> None:
        """Compute what each request got; a decoding request that got nothing is left out of this step."""
        idle = [request for request in self.decoding if request not in given]
        for request in idle:
            self._leave(request)
        self._step_decodes(step)
        for request in idle:
            self._start_decoding(request)
        for request, chunk in given.items():
            if request in self.prefilling:
                self._compute(request, chunk, step)

    def _take(self, need: int) -> bool:
        if need > self.pool.free:
            return False
        self.pool.take(need)
        return True

    def _schedule_waiting(self, step: Step, budget: int, threshold: int) -> None:
        limits, pool = self.limits, self.pool
        active = limits.active
        while budget > 0 and self.waiting and len(self.running) < active:
            request = self.waiting[0]
            if request.swapped:
                if not self._swap_in(request, step):
                    self._blocked = request
                    return
                continue
            hit, found = pool.lookup(request.table, (request.tokens - 1) // limits.block_size)
            left = request.tokens - hit * limits.block_size
            chunk = min(left, threshold or left)
            if not limits.enable_chunked_prefill and chunk > budget:
                return
            chunk = min(chunk, budget)
            if not self._admissible(request, hit, found, chunk):
                self._blocked = request if limits.scheduler_reserve_full_isl else None
                return
            self.waiting.popleft()
            self._admit(request, hit, found, step)
            self._grow(request, chunk)
            self._compute(request, chunk, step)
            budget -= chunk

    def _admissible(self, request: EngineRequest, hit: int, found: Sequence[BlockRun], chunk: int) -> bool:
        """Whether there is room for the whole prompt (or only its first part), plus the watermark beside
        other requests.
        """
        size = self.limits.block_size
        tokens = request.tokens if self.limits.scheduler_reserve_full_isl else hit * size + chunk
        need = -(-tokens // size) - hit + (self.pool.cost_of(found) if found else 0)
        return need + (self.watermark if self.running else 0) <= self.pool.free

    def _admit(self, request: EngineRequest, hit: int, found: Sequence[BlockRun], step: Step) -> None:
        self.pool.hold(request.table, hit, found)
        request.computed = hit * self.limits.block_size
        if request.cached < 0:
            request.cached = request.computed
        if self.limits.enable_prefix_caching and not request.preempted:
            self.queries += request.tokens
            self.hits += request.computed
        self.running[request] = None
        self.prefilling[request] = None
        if len(self.running) > self.most_running:
            self.most_running = len(self.running)
        step.admitted.append(request)

    def _grow(self, request: EngineRequest, chunk: int) -> bool:
        pool, table = self.pool, request.table
        need = -(-(request.computed + chunk) // pool.block_size) - table.blocks
        if need <= 0:
            return True
        if need > pool.plain + pool.idle:
            return False
        pool.take(need)
        table.blocks += need
        return True

    def _compute(self, request: EngineRequest, chunk: int, step: Step) -> None:
        step.prefill_tokens += chunk
        step.prefills += 1
        step.pairs += chunk * request.computed + chunk * (chunk + 1) // 2
        request.computed += chunk
        step.prefill_context += request.computed
        self._blocked = None
        if request.table.segments and self.limits.enable_prefix_caching:
            self.pool.remember(request.table, request.computed // self.limits.block_size)
        if request.computed >= request.tokens:
            del self.prefilling[request]
            step.sampling.append(request)

    def _sampled(self, request: EngineRequest, step: Step) -> None:
        """The step completed the prompt: its last position gives a token."""
        if request not in self.running:
            return
        request.made += 1
        if request.made >= request.output:
            self.draining.add(request)
            step.finishing.append(request)
        else:
            self._start_decoding(request)

    # ---- preemption

    def _victim(self) -> EngineRequest:
        """The request that was admitted last, or the least urgent one; its last token may already be
        scheduled."""
        if self.limits.policy == "priority":
            return max(self.running, key=lambda r: r.rank)
        return next(reversed(self.running))

    def _preempt(self, request: EngineRequest, step: Step) -> None:
        last = request in self.draining
        self._leave(request)
        step.preempted, self._blocked = True, None
        self.preemptions += 1
        request.preempted += 1
        swapped = request.table.blocks if not last and 0 < request.table.blocks <= self.swap_free else 0
        self.pool.release(request.table, request.computed)
        del self.running[request]
        if last:
            request.done = True
            return
        if swapped:
            request.swapped = swapped
            self.swap_free -= swapped
            step.swapped_blocks += swapped
        else:
            request.computed = 0
            request.tokens = request.prompt + request.made
        self._enqueue(request, front=True)

    def _swap_in(self, request: EngineRequest, step: Step) -> bool:
        """Bring a swapped request back into GPU memory; it goes on where it stopped."""
        if request.swapped + self.watermark > self.pool.free:
            return False
        self.waiting.popleft()
        self.pool.take(request.swapped)
        request.table.blocks = request.swapped
        self.swap_free += request.swapped
        step.swapped_blocks += request.swapped
        request.swapped = 0
        self.running[request] = None
        self.most_running = max(self.most_running, len(self.running))
        if request.computed >= request.tokens and request.made:
            self._start_decoding(request)
        else:
            self.prefilling[request] = None
        return True
