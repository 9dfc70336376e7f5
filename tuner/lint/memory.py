"""Whether weights, KV cache, activations and graphs fit on the card, and how the cards are used."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tuner.knobs.arguments import number
from tuner.knobs.model import ModelFacts
from tuner.lint.findings import Finding, found
from tuner.lint.subject import LintSubject
from tuner.measures import many
from tuner.records import Candidate, Value
from tuner.simulator.cost import Card, Memory
from tuner.simulator.options import Options, StartRefused
from tuner.simulator.predict import Scene, options_of
from tuner.traffic.trace import Trace

_BYTES = {"float32": 4, "float": 4, "auto": 2, "half": 2, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """An engine as the simulator takes it: its scene, its effective options, its memory."""

    scene: Scene
    knobs: Candidate
    options: Options
    memory: Memory

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache of one replica holds."""
        return self.memory.tokens(self.options.limits.block_size)


def fit_of(subject: LintSubject, scene: Scene) -> EngineFit | str:
    """The engine on the scene's card, or why the engine itself would refuse this configuration."""
    knobs = simulated(subject)
    try:
        options, memory = options_of(scene, knobs)
    except StartRefused as refused:
        return re.sub(r"^Value error, | \[type=.*", "", str(refused).splitlines()[-1].strip())
    return EngineFit(scene=scene, knobs=knobs, options=options, memory=memory)


def simulated(subject: LintSubject) -> Candidate:
    """The knobs for the simulator, which has one release's defaults: those of this release are spelled out.
    Replicas are left out; of a running server the KV cache has the size that it says.
    """
    facts, knobs = subject.facts, dict(subject.imported.candidate)
    if "gpu_memory_utilization" in facts.defaults:
        knobs.setdefault("gpu_memory_utilization", facts.defaults["gpu_memory_utilization"])
    if subject.live and subject.live.tokens:
        size = knobs.get("block_size", facts.defaults.get("block_size", 16))
        knobs["num_gpu_blocks_override"] = subject.live.tokens // (size if isinstance(size, int) else 16)
    dropped = ("data_parallel_size", "dtype", "enable_expert_parallel", "api_server_count", "watermark")
    kept = {name: value for name, value in knobs.items() if name not in dropped or name == "watermark"}
    return Candidate({name: value for name, value in kept.items() if name != "max_model_len" or value})


def card_for(card: Card, subject: LintSubject) -> Card:
    """The card with this release's defaults for it."""
    facts, defaults = subject.facts, subject.facts.defaults

    def whole(name: str, otherwise: int) -> int:
        value = defaults.get(name)
        return value if isinstance(value, int) and facts.platform == card.platform else otherwise

    return replace(
        card,
        max_num_seqs=whole("max_num_seqs", card.max_num_seqs),
        max_num_batched_tokens=whole("max_num_batched_tokens", card.max_num_batched_tokens),
        block_size=whole("block_size", card.block_size),
    )


def shaped(subject: LintSubject, shape: ModelFacts) -> ModelFacts:
    """The model in the number format that the engine holds it in, at the length that it allows."""
    kind = str(subject.imported.candidate.get("dtype") or "auto")
    length = max(shape.longest, subject.max_model_len or 0)
    return replace(shape, dtype_bytes=_BYTES.get(kind, 2), max_len=length, stretch=1.0)


def size(subject: LintSubject, name: str) -> int:
    """A parallel size as asked for, else 1."""
    value = subject.imported.candidate.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def layout(subject: LintSubject, gpus: int | None) -> Iterator[Finding]:
    """Cards that are left idle or missing, and heads that cannot be split."""
    split, stages, copies = (
        size(subject, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data")
    )
    used = split * stages * copies
    said = f"{split} x {stages} x {copies} (tensor x pipeline x data parallel), {many(gpus or 0, 'card')}"
    if gpus is not None and used > gpus:
        yield found(
            "cards-missing",
            f"the layout needs {used} cards, but there {'is' if gpus == 1 else 'are'} {gpus}",
            said,
        )
    elif gpus is not None and used < gpus:
        most = gpus // (split * stages)
        fix = f"--data-parallel-size {most}" if most > copies else ""
        yield found("cards-idle", f"the layout uses only {used} of {gpus} cards", said, fix)
    shape = subject.shape
    if shape is not None and shape.heads % split:
        near = max(n for n in range(1, split + 1) if shape.heads % n == 0)
        sentence = f"a tensor parallel size of {split} does not divide {shape.heads} attention heads"
        fix = f"--tensor-parallel-size {near}"
        yield found("heads-not-divided", sentence, shape.name, fix, flag="--tensor-parallel-size")


def length_over(subject: LintSubject) -> Iterator[Finding]:
    """A max_model_len that the model was not made for."""
    shape, asked = subject.shape, subject.max_model_len
    allowed = subject.imported.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if shape is None or asked is None or allowed or "hf-overrides" in subject.imported.args:
        return
    if asked > shape.longest:
        sentence = f"max_model_len {asked:,} is above the model's {shape.longest:,} tokens"
        fix = f"--max-model-len {shape.longest}"
        yield found(
            "length-over-model", sentence, f"{shape.name}: its config.json", fix, flag="--max-model-len"
        )


def check(subject: LintSubject, fit: EngineFit, trace: Trace | None) -> Iterator[Finding]:
    """Whether the engine comes up, how many KV tokens it has, how many requests of the trace fit at once."""
    memory, card, tokens = fit.memory, fit.scene.card, fit.tokens
    ranks = fit.options.ranks
    used = fit.scene.card.memory_gib * ranks * fit.options.budget.utilization
    parts = (
        f"weights {memory.weights_gib:.2f} GiB, activations {memory.activation_gib:.2f} GiB, KV cache"
        f" {max(0.0, memory.kv_gib):.2f} GiB; usable {used:.1f} GiB on {ranks} x {card.title}. "
        f"Captured graphs need {memory.graphs_gib:.2f} GiB more"
    )
    if subject.live and subject.live.tokens:
        yield from _room(fit, trace, f"the server's own /metrics: {tokens:,} tokens")
        return
    if memory.weights_gib >= used:
        need = next(
            (n for n in (2, 4, 8, 16) if n > ranks and memory.weights_gib < used / ranks * n * 0.9), None
        )
        fix = f"--tensor-parallel-size {need}" if need else ""
        if memory.weights_gib < 0.85 * card.memory_gib * ranks:
            fix = "--gpu-memory-utilization 0.92"
        sentence = (
            f"the weights take {memory.weights_gib:.1f} GiB, but the engine may use only {used:.1f} GiB"
        )
        yield found("weights-do-not-fit", sentence, parts, fix)
        return
    length = fit.options.limits.max_model_len
    if tokens < length:
        yield _short(subject, fit, parts)
        return
    if memory.missing_gib > 0:
        sentence = f"graphs and warm-up need {memory.missing_gib:.2f} GiB more than the card has"
        lower = fit.options.budget.utilization - memory.missing_gib / (card.memory_gib * ranks) - 0.01
        fix = f"--gpu-memory-utilization {number(round(lower, 2))}"
        yield found("out-of-memory", sentence, parts, fix)
    yield from _room(fit, trace, parts)


def _short(subject: LintSubject, fit: EngineFit, parts: str) -> Finding:
    length, block = fit.options.limits.max_model_len, fit.options.limits.block_size
    most = fit.tokens // block * block
    asked: Value = subject.imported.candidate.get("max_model_len")
    whose = "" if asked else " (the model's own limit)"
    sentence = f"the KV cache holds {max(0, fit.tokens):,} tokens, but one request may have {length:,}{whose}"
    fix = f"--max-model-len {most}" if most > 0 else ""
    return found("no-kv-memory", sentence, parts, fix, flag="--max-model-len")


def _room(fit: EngineFit, trace: Trace | None, parts: str) -> Iterator[Finding]:
    length, tokens = fit.options.limits.max_model_len, fit.tokens
    sentence = f"the KV cache holds {tokens:,} tokens. This is enough for {tokens / length:.1f} requests of"
    sentence += f" max_model_len ({length:,} tokens)"
    if trace is not None and len(trace):
        whole = trace.input_len.astype("int64") + trace.output_len
        mean, longest = float(whole.mean()), int(whole.max())
        held = many(int(tokens / mean), "request", ",")
        sentence += (
            f", or for {held} of the trace's mean length ({mean:,.0f} tokens; the longest: {longest:,})"
        )
        over = int((whole > length).sum())
        if over:
            said = (
                f"{over} of {many(len(trace), 'request')}; the longest has {longest:,} tokens with its answer"
            )
            wrong = f"{over / len(trace):.1%} of the requests are longer than max_model_len {length:,}"
            yield found(
                "requests-too-long", wrong, said, f"--max-model-len {longest}", flag="--max-model-len"
            )
    yield found("kv-memory", sentence, parts)
