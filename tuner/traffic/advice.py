"""What the numbers of a trace say about the knobs: one sentence each, with the number it rests on."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.traffic.statistics import Statistics


def advise(numbers: "Statistics") -> tuple[str, ...]:
    """Sentences, most useful first; empty for a trace too small to tell."""
    if numbers.requests < 20:
        return ()
    return (
        *_batch(numbers),
        *_beams(numbers),
        *_lengths(numbers),
        *_bursts(numbers),
        *_reuse(numbers),
        *_turns(numbers),
        *_data(numbers),
    )


def sequences_for(numbers: "Statistics") -> int | None:
    """The max_num_seqs beyond which more buys nothing, by p99 concurrency; None where that is not known."""
    p99 = numbers.concurrency.get("p99")
    return 1 << (max(1, round(p99 * 1.5)) - 1).bit_length() if p99 else None


def _batch(numbers: "Statistics") -> Iterator[str]:
    enough = sequences_for(numbers)
    if enough is not None:
        yield (
            f"p99 concurrency {numbers.concurrency['p99']:.0f} ({numbers.concurrency_source}):"
            f" max_num_seqs beyond {enough} buys nothing unless the engine is slower than that"
        )
    if numbers.parallel_share > 0:
        yield (
            f"{numbers.parallel_share:.1%} of requests ask for n > 1 answers: each answer takes a sequence "
            "of its own in max_num_seqs"
        )


def _beams(numbers: "Statistics") -> Iterator[str]:
    if numbers.beam_share > 0:
        yield (
            f"{numbers.beam_share:.1%} of requests are beam searches, which vLLM does not stream: no study"
            " replays them; `tuner trace reshape --beam sample` makes sampled answers of them, `--beam drop`"
            " leaves them out"
        )


def _lengths(numbers: "Statistics") -> Iterator[str]:
    longest, mean = numbers.input_len["p99"], numbers.input_len["mean"]
    yield (
        f"prompts: mean {mean:.0f}, p99 {longest:.0f} tokens: a max_num_batched_tokens below {longest:.0f} "
        "splits the longest prompts into chunks, above it they hold up decoding for one long step"
    )
    declared = numbers.max_tokens
    if declared and declared["p50"] > 4 * max(1.0, numbers.output_len["p50"]):
        yield (
            f"declared max_tokens (median {declared['p50']:.0f}) is far above what is generated (median "
            f"{numbers.output_len['p50']:.0f}): do not size memory by max_tokens"
        )
    top = numbers.total_len["p100"]
    yield f"longest request: {top:.0f} tokens with its answer: a larger max_model_len is not needed"


def _bursts(numbers: "Statistics") -> Iterator[str]:
    second, minute = numbers.dispersion.get("1s"), numbers.dispersion.get("60s")
    if second and second > 3:
        yield (
            f"arrivals come in bursts (variance {second:.1f} × Poisson's in 1 s): judge by p95/p99, and let "
            "the slices hold the bursts"
        )
    if minute and minute > 5:
        yield f"the rate wanders (variance {minute:.1f} × Poisson's in 60 s): one slice is not enough"


def _reuse(numbers: "Statistics") -> Iterator[str]:
    if numbers.reuse is None:
        yield "no block ids: prefix reuse is unknown and every prompt is replayed as unique"
        return
    best = numbers.reuse["any"]
    if best < 0.01:
        yield f"prefix reuse {best:.1%} with any cache: enable_prefix_caching buys nothing"
        return
    sized = [(int(size), share) for size, share in numbers.reuse.items() if size != "any"]
    enough = next((size for size, share in sized if share >= 0.8 * best), None)
    where = (
        f"a KV cache of {enough:,} tokens finds most of it"
        if enough
        else "even 6,400,000 KV tokens find less"
    )
    yield f"prefix reuse up to {best:.1%} of input tokens: {where}"


def _turns(numbers: "Statistics") -> Iterator[str]:
    if numbers.prefers_live_history:
        yield (
            f"{numbers.multi_turn_share:.0%} of requests are later turns and answers are long: "
            "history: live in the study lets the engine reuse its own answers, as in production"
        )
    elif numbers.reuse is not None and not numbers.sessions:
        yield (
            "block ids but no sessions: `tuner trace reshape --infer-sessions` tells conversations from them"
        )


def _data(numbers: "Statistics") -> Iterator[str]:
    if numbers.resolution_s > 0.005:
        yield (
            f"the source stamps time in steps of {numbers.resolution_s:g} s: shorter bursts are lost, "
            "arrivals were spread within a step"
        )
    bad = numbers.requests - numbers.statuses.get("ok", 0)
    if bad:
        yield f"{bad} requests did not end well in production; they are kept and flagged"
