"""How much KV memory is left beside the weights, and what does not fit: the start-up profile."""

from dataclasses import dataclass

from tuner.knobs.model import ModelFacts
from tuner.simulator.cost import GIB, Card


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the engine is told about memory. `kv_bytes` and `blocks` override the profile."""

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
    """The profile in GiB, the blocks it gives, what is missing after warm-up (> 0: out of memory)."""

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
