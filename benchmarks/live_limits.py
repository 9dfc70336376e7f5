"""Screening by live limits against relaunching, on a real vLLM (default: the CPU build, a tiny model).

    python benchmarks/live_limits.py --python PATH/TO/python [--candidates 12] [--output FILE.json]

Six candidates are measured twice: each in an engine of its own, and all inside one running engine whose
limits are changed in between. Then the other candidates inside that engine, and what the wall clock said.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tuner.engine import limits
from tuner.engine.server import Server, serve
from tuner.records import JSON, LaunchSpec, Value
from tuner.search.proposals import spearman

MODEL: dict[str, JSON] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
    "max_position_embeddings": 2048, "torch_dtype": "float32", "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
WIDE: Mapping[str, Value] = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
BOTH: tuple[Mapping[str, Value], ...] = tuple(
    {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    for seqs, tokens in ((32, 1024), (16, 1024), (8, 1024), (4, 1024), (2, 1024), (32, 64))
)


def candidates(count: int) -> list[Mapping[str, Value]]:
    """The six, then others that differ from them."""
    more = [{"max_num_seqs": s, "max_num_batched_tokens": t} for t in (512, 256, 128) for s in (32, 16, 8, 4)]
    return [*BOTH, *more][:count]


def launch(python: str, home: Path, number: int, knobs: Mapping[str, Value], *, live: bool) -> LaunchSpec:
    launch_id = f"bench-{time.time_ns():x}"
    env, argv = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}, []
    for name, value in knobs.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    if live:
        installed = limits.install(home, launch_id)
        env, argv = {**env, **installed.env}, [*argv, *installed.argv]
    return LaunchSpec(
        launch_id=launch_id,
        command=(python, "-m", "vllm.entrypoints.openai.api_server"),
        model=str(home / "model"),
        argv=("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "1024", *argv),
        served_name="m",
        directory=str(home / f"launch{number}"),
        env=env,
    )


async def measure(server: Server, salt: int, requests: int = 48, over_s: float = 4.0) -> float:
    """Mean end-to-end seconds of an open loop: the same lengths and arrivals each time, fresh tokens."""

    async def one(index: int) -> float:
        due = begun + over_s * index / requests
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        prompt: JSON = [
            (31 * salt + 7 * index + k * (1 + index % 3)) % 2000 + 10 for k in range(120 + 10 * index)
        ]
        body: JSON = {"model": "m", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        reply = await server.ask("POST", "/v1/completions", body=body, timeout_s=300)
        assert reply.status == 200, reply.text
        return time.monotonic() - due

    await server.reset_cache()
    begun = time.monotonic() + 0.1
    return statistics.mean(await asyncio.gather(*(one(i) for i in range(requests))))


async def run(python: str, count: int) -> dict[str, JSON]:
    home = Path(tempfile.mkdtemp(prefix="bench-live-"))
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(MODEL))
    relaunched, relaunch_s = [], []
    for number, knobs in enumerate(BOTH):
        begun = time.monotonic()
        async with serve(launch(python, home, number, knobs, live=False)) as server:
            await measure(server, 999)
            relaunched.append(await measure(server, number))
        relaunch_s.append(time.monotonic() - begun)
        print(f"relaunched {dict(knobs)}: {relaunched[-1]:.3f} s, {relaunch_s[-1]:.0f} s of wall", flush=True)
    screened = []
    begun = time.monotonic()
    async with serve(launch(python, home, 99, WIDE, live=True)) as server:
        await measure(server, 999)
        for number, knobs in enumerate(candidates(count)):
            if not await limits.change(server, knobs):
                raise SystemExit(f"the engine refused {dict(knobs)}: {await limits.ask(server, {})}")
            screened.append(await measure(server, 100 + number))
            print(f"screened {dict(knobs)}: {screened[-1]:.3f} s", flush=True)
    live_s = time.monotonic() - begun
    return {
        "relaunched_e2e_s": list(relaunched),
        "screened_e2e_s": list(screened),
        "rank_correlation": spearman(relaunched, screened[: len(BOTH)]),
        "relaunch_wall_s_each": statistics.mean(relaunch_s),
        "candidates": count,
        "live_wall_s": live_s,
        "relaunch_wall_s": statistics.mean(relaunch_s) * count,
        "share": live_s / (statistics.mean(relaunch_s) * count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--candidates", type=int, default=12)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    found = asyncio.run(run(asked.python, asked.candidates))
    text = json.dumps(found, indent=1)
    print(text)
    if asked.output:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
