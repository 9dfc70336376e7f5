"""How exact is the ruler: ours, `vllm bench serve`, guidellm and AIPerf against a server of known timing.

One core serves (benchmarks/known_server.py), one core is the client's, all tools in one run, interleaved.
Peers live in environments of their own; one that is not installed is left out and said so.

    python -m benchmarks.replay                      # five runs of everything
    python -m benchmarks.replay --minutes 12         # a part of it; again: goes on where it stopped
    python -m benchmarks.replay --runs 1 --loads 1000x25 --tools ours,vllm --output /tmp/look
    python -m benchmarks.replay --long               # ours alone: 500 streams of 300 tokens for 60 s

Lateness: a request's arrival at the server against the constant schedule, anchored at the least late one (so
a uniform delay is forgiven to all). Errors: what the tool says less what the server knows, per request, in
the order of sending. Ours counts TTFT and E2E from the schedule, peers from their own send. A run during
which other people's processes used more of a core than `--others` says nothing of the tool: it is repeated,
up to five times, whatever it gave, and the table tells how often.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.replay_tools import ROOT, TOOLS, Load, Seen, tokenizer, versions

FIRST_MS, GAP_MS = 200.0, 20.0
LOADS = ((100, 25), (500, 25), (1000, 25), (16.1, 300), (80.6, 300))
REPEATS = 5
Results = dict[str, dict[str, list[dict[str, float]]]]


@contextmanager
def known_server(core: int) -> Iterator[tuple[int, int]]:
    """A server of known timing on a core of its own: (port, pid)."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "known_server.py"), "--core", str(core),
        "--first-ms", str(FIRST_MS), "--gap-ms", str(GAP_MS),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.terminate()
        process.wait()


KERNEL_THREAD = 0x00200000


class Meter(threading.Thread):
    """CPU seconds over time of the client's processes, and of those that are neither its, the server's, ours
    nor the kernel's; read with as little work as possible."""

    def __init__(self, client: int, server: int) -> None:
        super().__init__(daemon=True)
        self.roots = (client, server)
        self.samples: list[tuple[float, float, float]] = []
        self.stopped = threading.Event()
        self.spent: dict[int, float] = {}
        self.own: set[int] = set()

    def run(self) -> None:
        tick, before = os.sysconf("SC_CLK_TCK"), dict[int, float]()
        while True:
            self.own.update(tree(self.roots[0]))
            ours = {os.getpid(), *tree(self.roots[1])} - self.own
            for place in Path("/proc").iterdir():
                try:
                    fields = (
                        (place / "stat").read_text().rsplit(")", 1)[1].split() if place.name.isdigit() else []
                    )
                except OSError:
                    continue
                if fields and not int(fields[6]) & KERNEL_THREAD and int(place.name) not in ours:
                    self.spent[int(place.name)] = (int(fields[11]) + int(fields[12])) / tick
            before = before or dict(self.spent)
            used = {pid: spent - before.get(pid, 0.0) for pid, spent in self.spent.items()}
            client = sum(spent for pid, spent in used.items() if pid in self.own)
            self.samples.append((time.perf_counter() * 1e9, client, sum(used.values()) - client))
            if self.stopped.wait(1.0):
                return

    def between(self, start_ns: float, end_ns: float) -> tuple[float, float]:
        """CPU seconds used between two instants of perf_counter: the client's, and other people's."""
        at, client, others = np.array(self.samples or [(0.0, 0.0, 0.0)]).T
        ends = [start_ns, end_ns]
        return float(np.diff(np.interp(ends, at, client))[0]), float(np.diff(np.interp(ends, at, others))[0])


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
    with tempfile.TemporaryDirectory() as folder, known_server(cores[0]) as (port, serving):
        room = Path(folder)
        tokenizer(room / "tokenizer")
        command, env, read = TOOLS[tool][0](port, load, room)
        began = time.monotonic()
        with (room / "log").open("wb") as log:
            process = subprocess.Popen(
                ["taskset", "-c", str(cores[1]), *command],
                env={**os.environ, **env}, stdout=log, stderr=log, cwd=room,
            )  # fmt: skip
            meter = Meter(process.pid, serving)
            meter.start()
            try:
                code = process.wait(timeout=load.seconds * 3 + 90)
            except subprocess.TimeoutExpired:
                code = None
                for pid in [*tree(process.pid)]:
                    os.kill(pid, signal.SIGKILL)
                process.wait()
            meter.stopped.set()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/truth") as reply:
            truth = json.load(reply)
        if code is None:
            print(f"{tool} did not end, {load.name}", file=sys.stderr)
        elif code != 0:
            print((room / "log").read_text(errors="replace")[-600:], file=sys.stderr)
        try:
            seen = read() if code == 0 else None
        except (OSError, ValueError, KeyError) as error:
            print(f"{tool}: {error}", file=sys.stderr)
            seen = None
        found = compare(load, truth["requests"], seen, meter)
        return {
            **found, "most_in_flight": truth["most_in_flight"], "wall_s": time.monotonic() - began,
        }  # fmt: skip


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
            "server_late_p99_ms": float(np.percentile((truth[:, 1] - truth[:, 0]) / 1e6 - FIRST_MS, 99)),
        }
        used, others = meter.between(truth[0, 0], truth[:, 2].max())
        span = (truth[:, 2].max() - truth[0, 0]) / 1e9
        found |= {"cpu_ms_per_request": used * 1e3 / len(truth), "others_cpu": others / span}
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


def table(results: Results) -> str:
    """Medians over the runs, as Markdown."""
    columns = (
        "late_p50_ms", "late_p99_ms", "ttft_error_p50_ms", "ttft_error_p99_ms", "tpot_error_p99_ms",
        "e2e_error_p99_ms", "cpu_ms_per_request", "lost", "most_in_flight", "server_late_p99_ms",
        "others_cpu", "repeated",
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


def verdicts(results: Results) -> list[str]:
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


def quiet(tool: str, load: Load, cores: tuple[int, int], others: float) -> dict[str, float]:
    """One run, repeated while other people's processes disturbed it."""
    found = once(tool, load, cores)
    repeated = 0
    while found.get("others_cpu", 0.0) > others and repeated < REPEATS:
        found, repeated = once(tool, load, cores), repeated + 1
    return {**found, "repeated": repeated}


def show(results: Results) -> str:
    return table(results) + "\n\n" + "\n".join(f"- {line}" for line in verdicts(results)) + "\n"


def go_on(place: Path, about: dict[str, object], loads: list[Load], tools: list[str]) -> Results:
    """The results of an earlier part of the same thing, or none."""
    results: Results = {load.name: {tool: [] for tool in tools} for load in loads}
    if place.exists():
        said = json.loads(place.read_text())
        if all(said["about"].get(key) == value for key, value in about.items()):
            for load, found in said["results"].items():
                results.setdefault(load, {}).update(found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--loads", default=",".join(f"{rate:g}x{tokens}" for rate, tokens in LOADS))
    parser.add_argument("--cores", default="0,1", help="the server's core and the client's")
    parser.add_argument("--others", type=float, default=0.02, help="share of a core that others may use")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--long", action="store_true", help="500 streams of 300 tokens for 60 s, ours alone")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "replay")
    asked = parser.parse_args()
    if asked.long:
        asked.tools, asked.loads, asked.seconds = "ours", "80.6x300", 60.0
        asked.output = asked.output.with_name(asked.output.name + "-long")
    server, own = map(int, asked.cores.split(","))
    os.sched_setaffinity(0, {server})
    tools = [tool for tool in asked.tools.split(",") if TOOLS[tool][1].exists()]
    for tool in set(asked.tools.split(",")) - set(tools):
        print(f"{tool} is not installed: {TOOLS[tool][1]}", file=sys.stderr)
    pairs = [one.split("x") for one in asked.loads.split(",")]
    loads = [Load(float(rate), int(tokens), asked.seconds) for rate, tokens in pairs]
    about: dict[str, object] = {
        "first_ms": FIRST_MS, "gap_ms": GAP_MS, "seconds": asked.seconds, "others": asked.others,
        "python": platform.python_version(), "kernel": platform.release().split("-")[0],
        "versions": versions(),
    }  # fmt: skip
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    place, end = asked.output.with_suffix(".json"), time.monotonic() + asked.minutes * 60
    results = go_on(place, about, loads, tools)
    for number in range(asked.runs):
        for load in loads:
            for tool in tools:
                runs = results[load.name].setdefault(tool, [])
                if len(runs) > number or time.monotonic() > end:
                    continue
                runs.append(quiet(tool, load, (server, own), asked.others))
                short = {k: round(v, 2) for k, v in runs[-1].items()}
                print(f"run {number} {load.name} {tool}: {json.dumps(short)}", flush=True)
                place.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    said = f"`python -m benchmarks.replay {shlex.join(sys.argv[1:])}`".replace(" `", "`")
    lines = [f"{name} {version}" for name, version in versions().items()]
    kept = f"{said}, {asked.seconds:g} s a run, {', '.join(lines)}, Python {platform.python_version()}, "
    text = f"{kept}Linux {platform.release().split('-')[0]}\n\n{show(results)}"
    print(text)
    asked.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
