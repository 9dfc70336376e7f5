"""What a model takes on a card: the time of a step (a roofline with a few efficiencies), and KV memory.

The presets are physical and uncalibrated: dense 16-bit tensor throughput, memory bandwidth and memory size as
the makers' datasheets give them, efficiencies as usual for dense kernels. `calibrate` fits `Coefficients` to
measured trials.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType

from tuner.errors import BadInput, nearest
from tuner.knobs.model import ModelFacts
from tuner.simulator.state import Step

GIB = float(1 << 30)
_HOP_S = 4e-6  # latency of one all-reduce without data; fitted to benchmarks/table/h200-7b-two-cards
# Of reading weights and computing, the share of the shorter that the longer does not hide: docs/simulator.md.
_UNHIDDEN = 0.25
# The share of `layer_s` that a step without prompts takes (it has fewer kernels), and the host's seconds
# between two steps without async scheduling; both fitted to benchmarks/table/h200-7b.
_DECODES = 0.75
_BETWEEN_S = 0.0025
_SHARED = (
    1.3  # the host's launches of a step that no graph covers take so much longer with all-reduces; same rows
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device: dense 16-bit FLOP/s, bytes/s of memory, GiB, bytes/s to the host, the engine's defaults."""

    name: str
    title: str
    flops: float
    bandwidth: float
    memory_gib: float
    pcie: float = 25e9
    platform: str = "cuda"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    reserved_gib: float = 0.24  # context, libraries: outside the engine's own allocations
    link: float = 25e9  # bytes/s from one card to the others of its host, one way; PCIe unless it has more
    ranks: int = 1  # cards that share every layer

    def group(self, ranks: int) -> "Card":
        """So many of these cards as one: tensor parallelism splits weights, KV memory and work evenly."""
        return replace(
            self,
            flops=self.flops * ranks,
            bandwidth=self.bandwidth * ranks,
            memory_gib=self.memory_gib * ranks,
            pcie=self.pcie * ranks,
            reserved_gib=self.reserved_gib * ranks,
            ranks=ranks,
        )


# Figures of the manufacturers: dense 16-bit FLOP/s, bytes per second, memory (docs/simulator.md).
_CARDS = (
    Card(
        name="h100-80",
        title="NVIDIA H100 80GB HBM3",
        flops=989e12,
        bandwidth=3.35e12,
        memory_gib=79.18,
        pcie=55e9,
        link=450e9,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
    ),
    Card(
        name="h200",
        title="NVIDIA H200",
        flops=989e12,
        bandwidth=4.8e12,
        memory_gib=139.8,
        pcie=55e9,
        link=450e9,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
    ),
    Card(
        name="a100-40",
        title="NVIDIA A100-SXM4-40GB",
        flops=312e12,
        bandwidth=1.555e12,
        memory_gib=39.39,
        link=300e9,
    ),
    Card(
        name="a100-80",
        title="NVIDIA A100-SXM4-80GB",
        flops=312e12,
        bandwidth=2.039e12,
        memory_gib=79.15,
        link=300e9,
    ),
    Card(name="a4500", title="NVIDIA RTX A4500", flops=94.6e12, bandwidth=0.64e12, memory_gib=19.7),
    Card(name="l40s", title="NVIDIA L40S", flops=362e12, bandwidth=0.864e12, memory_gib=44.39),
    Card(
        name="rtx5090",
        title="NVIDIA GeForce RTX 5090",
        flops=209.5e12,
        bandwidth=1.792e12,
        memory_gib=31.36,
        pcie=55e9,
        link=55e9,
    ),
    Card(
        name="cpu",
        title="CPU",
        flops=0.4e12,
        bandwidth=20e9,
        memory_gib=8.0,
        platform="cpu",
        max_num_seqs=128,
        block_size=128,
        reserved_gib=0.0,
    ),
)
CARDS: Mapping[str, Card] = MappingProxyType({card.name: card for card in _CARDS})


def card_of(name: str) -> Card:
    """The preset of that name. BadInput names the nearest one."""
    if name not in CARDS:
        raise BadInput(f"unknown card '{name}'{nearest(name, CARDS)}; known: {', '.join(CARDS)}")
    return CARDS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What a datasheet does not give. Efficiencies are shares of the datasheet's figure, times are
    seconds.
    """

    compute: float = 0.66  # matrix products of the layers; fitted to 7B and 32B shapes on an H100 and an H200
    memory: float = 0.85  # reading weights and KV
    attention: float = 0.45  # query × key products of prompts
    step_s: float = 0.0014  # per step: scheduling, launches, sampling
    seq_s: float = 8e-6  # per sequence of a step: input preparation, output handling
    request_s: float = 0.004  # per request, outside the engine's steps: HTTP, tokens in, first chunk out
    layer_s: float = (
        0.00069  # per layer, for the host to launch its kernels where no CUDA graph holds the step
    )
    sync_s: float = (
        1.3e-5  # per sequence, for the host between two steps where scheduling is not asynchronous
    )

    def scaled(self, factors: Mapping[str, float]) -> "Coefficients":
        """The same with some of them multiplied."""
        return replace(self, **{name: getattr(self, name) * by for name, by in factors.items()})

    def slowed(self, by: float) -> "Coefficients":
        """The same device with every step slower by this factor."""
        return self.scaled(
            {"compute": 1 / by, "memory": 1 / by, "attention": 1 / by}
            | {name: by for name in ("step_s", "seq_s", "layer_s", "sync_s")}
        )

    def to_json(self) -> dict[str, float]:
        return dict(asdict(self))


def coefficients_of(kept: object) -> "Coefficients | None":
    """Coefficients that `to_json` wrote; None for anything else, such as an older set of names."""
    if not isinstance(kept, Mapping) or set(kept) != set(COEFFICIENT_NAMES):
        return None
    values = [v for v in kept.values() if isinstance(v, int | float) and 0 < v < math.inf]
    return Coefficients(**kept) if len(values) == len(kept) else None


COEFFICIENT_NAMES = tuple(field.name for field in fields(Coefficients))

# Assumed, as the start of a fit: no datasheet gives a CPU's efficiencies (`calibrate.CPU_UNSURE`).
CPU_COEFFICIENTS = Coefficients(compute=0.35, memory=0.5, attention=0.15, step_s=0.003, seq_s=5e-5)


def preset(card: Card) -> Coefficients:
    """The uncalibrated coefficients of a kind of device."""
    return CPU_COEFFICIENTS if card.platform == "cpu" else Coefficients()


def capture_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes for which vLLM captures a CUDA graph, up to `most`: 1, 2, 4, by 8 to 256, then by 16."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, most + 1, 16)]
    return tuple(size for size in sizes if size <= most)


class StepCost:
    """Step time for one model on one card under one engine configuration, in seconds."""

    def __init__(
        self,
        facts: ModelFacts,
        card: Card,
        coefficients: Coefficients,
        *,
        block_size: int = 16,
        capture_most: int = 512,
        kv_scale: float = 1.0,
        overlapped: bool = True,
    ) -> None:
        width = facts.heads * facts.head_dim
        self.coefficients = coefficients
        self.sizes = capture_sizes(capture_most) if card.platform == "cuda" else ()
        self.captured = self.sizes[-1] if self.sizes else -1  # the most tokens of a step that a graph holds
        embedding = facts.vocab_size * facts.hidden
        # Parameters of the layers' matrices: attention's four and the gated block's three.
        attention = facts.hidden * facts.head_dim * (2 * facts.heads + 2 * facts.kv_heads)
        layers = facts.layers * (attention + 3 * facts.hidden * facts.intermediate)
        flops = card.flops * coefficients.compute
        bandwidth = card.bandwidth * coefficients.memory
        self.token_s = 2.0 * layers / flops
        self.head_s = 2.0 * embedding / flops
        self.weights_s = (layers + embedding) * facts.dtype_bytes / bandwidth
        self.kv_bytes = facts.kv_bytes_per_token * kv_scale
        launches = facts.layers * coefficients.layer_s * (_SHARED if card.ranks > 1 else 1.0)
        self.floor_s = launches if card.platform == "cuda" else 0.0
        self.decode_floor_s = _DECODES * self.floor_s
        self.seq_s = coefficients.seq_s + (0.0 if overlapped else coefficients.sync_s)
        self.step_s = coefficients.step_s + (0.0 if overlapped else _BETWEEN_S)
        self.kv_s = self.kv_bytes / bandwidth
        self.pair_s = 4.0 * facts.layers * width / (card.flops * coefficients.attention)
        self.block_bytes = self.kv_bytes * block_size
        self.swap_s = self.block_bytes / card.pcie
        sums = 2 * facts.layers if card.ranks > 1 else 0
        share = 2 * (card.ranks - 1) / card.ranks * facts.hidden * facts.dtype_bytes / card.link
        self.sums_s, self.sum_token_s = sums * _HOP_S, sums * share
        self._known: dict[tuple[int, int], float] = {}

    def _dense(self, tokens: int, sampled: int) -> float:
        """The layers' matrix products: the longer of reading the weights and computing, and a share of the
        other: no matrix product reads while its last tiles compute, or computes before its first are read."""
        found = self._known.get((tokens, sampled))
        if found is None:
            padded = self.sizes[bisect_left(self.sizes, tokens)] if tokens <= self.captured else tokens
            compute = padded * self.token_s + sampled * self.head_s
            dense = max(compute, self.weights_s) + _UNHIDDEN * min(compute, self.weights_s)
            found = self._known[tokens, sampled] = dense + self.sums_s + padded * self.sum_token_s
        return found

    def decode_line(self, count: int, context: int) -> tuple[float, float]:
        """(seconds of a step of `count` decodes without its KV reads, seconds per token of KV read). If the
        launches of the host take longer than a step that reads `context` tokens, this is (their time, 0).
        """
        around, dense = self.step_s + count * self.seq_s, self._dense(count, count)
        if count > self.captured and dense + context * self.kv_s < self.decode_floor_s:
            return around + self.decode_floor_s, 0.0
        return around + dense, self.kv_s

    def __call__(self, step: Step) -> float:
        tokens = step.decodes + step.prefill_tokens
        busy = self._dense(tokens, step.decodes + len(step.sampling))
        busy += (step.context + step.prefill_context) * self.kv_s + step.pairs * self.pair_s
        if tokens > self.captured:
            busy = max(busy, self.floor_s if step.prefills else self.decode_floor_s)
        sequences = step.decodes + step.prefills
        return self.step_s + sequences * self.seq_s + busy + step.swapped_blocks * self.swap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The engine's arguments about memory. `kv_bytes` and `blocks` override the profile."""

    utilization: float = 0.92
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    capture_most: int = 512
    kv_scale: float = 1.0  # bytes of a cached number over those of the model's own format
    kv_bytes: int | None = None
    blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The profile in GiB, the blocks that it gives, and the memory that is missing after warm-up (> 0: out of
    memory).
    """

    weights_gib: float
    activation_gib: float
    graphs_gib: float
    kv_gib: float
    blocks: int
    missing_gib: float

    def tokens(self, block_size: int) -> int:
        return self.blocks * block_size


def profile(facts: ModelFacts, card: Card, budget: Budget, *, compiles: bool = False) -> Memory:
    """Memory as the engine would find it: weights, the widest step, the rest for KV; then the graphs.

    Activations are the widest layer of one step (gate, up and their product, plus residuals) or the logits of
    all sequences in 32 bit beside their 16-bit copy, whichever is larger. A boot that `compiles` also holds a
    second embedding for a moment: with small steps its KV cache is smaller than that of later boots.
    """
    weights = facts.parameters * facts.dtype_bytes / GIB
    layer = budget.max_num_batched_tokens * (3 * facts.intermediate + 4 * facts.hidden) * facts.dtype_bytes
    logits = budget.max_num_seqs * facts.vocab_size * (4 + facts.dtype_bytes)
    embedding = facts.vocab_size * facts.hidden * facts.dtype_bytes if compiles else 0
    activation = max(layer, logits, embedding) / GIB
    graphs = _graphs(facts, budget) if card.platform == "cuda" else 0.0
    if budget.kv_bytes is not None:
        kv = budget.kv_bytes / GIB
    else:
        kv = card.memory_gib * budget.utilization - card.reserved_gib - weights - activation
    per_block = facts.kv_bytes_per_token * budget.kv_scale * budget.block_size
    blocks = max(0, int(kv * GIB // per_block))
    if budget.blocks is not None:
        blocks = budget.blocks
    used = weights + card.reserved_gib + graphs + blocks * per_block / GIB
    # The sampler's warm-up comes after the profile: probabilities of all sequences, sorted, beside the step.
    warm_up = activation + budget.max_num_seqs * facts.vocab_size * 4 / GIB
    return Memory(
        weights_gib=weights,
        activation_gib=activation,
        graphs_gib=graphs,
        kv_gib=kv,
        blocks=blocks,
        missing_gib=used + warm_up - card.memory_gib if card.platform == "cuda" else 0.0,
    )


def _graphs(facts: ModelFacts, budget: Budget) -> float:
    """GiB of captured graphs: of mixed steps, and of decode steps up to the number of sequences."""
    mixed = 2.2 * budget.capture_most * facts.layers * facts.hidden * facts.dtype_bytes / GIB
    return 0.1 + mixed + 0.0008 * min(budget.capture_most, budget.max_num_seqs)
