"""An engine that misbehaves on order: vLLM's argv and HTTP, and one known fault per `--fault NAME[=VALUE]`.

It is a program of its own (standard library only), so that what is tested is processes, sockets and files.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORDS: dict[str, str] = json.loads(Path(__file__).with_name("words.json").read_text())
V0 = "WARNING --preemption-mode is not supported by the V1 Engine. Falling back to V0."
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


class State:
    """What the engine counts, and the faults it was ordered."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.names: list[str] = options.served_model_name or [options.model]
        self.faults: dict[str, str] = dict(f.partition("=")[::2] for f in options.fault)
        self.options = options
        self.completions = 0
        self.refusals = 0
        self.iterations = 0
        self.preemptions = 0
        self.lock = threading.Lock()

    def number(self, fault: str, default: float = 0.0) -> float:
        return float(self.faults.get(fault) or default)

    def metrics(self) -> str:
        stuck = "freeze" in self.faults or "thrash" in self.faults
        if "thrash" in self.faults:
            self.preemptions += 3
        tokens = int(self.number("kv_tokens", 4096))
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0"}} {4.0 if stuck else 0.0}\n'
            "# TYPE vllm:num_requests_waiting gauge\n"
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            "# TYPE vllm:num_preemptions counter\n"
            f'vllm:num_preemptions_total{{engine="0"}} {self.preemptions}\n'
            "# TYPE vllm:generation_tokens counter\n"
            f'vllm:generation_tokens_total{{engine="0"}} {self.iterations}\n'
            "# TYPE vllm:iteration_tokens_total histogram\n"
            f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {self.iterations}\n'
            f'vllm:iteration_tokens_total_count{{engine="0"}} {self.iterations}\n'
            f'vllm:iteration_tokens_total_sum{{engine="0"}} {self.iterations * 8}\n'
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{tokens // 16}"}} 1.0\n'
        )


class Handler(BaseHTTPRequestHandler):
    """vLLM's endpoints, as far as the engine room asks them."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "deaf" in self.state.faults and self.state.completions > 1:
            time.sleep(600)
        if path == "/health":
            sick = "sicken" in self.state.faults and self.state.completions > 1
            self._answer(503 if sick else 200, b"")
        elif path == "/v1/models":
            self._json({"data": [{"id": name} for name in self.state.names]})
        elif path == "/version":
            self._json({"version": "0.32.0"})
        elif path == "/metrics":
            self._answer(200, self.state.metrics().encode())
        elif path == "/server_info":
            scheduler = {"max_num_seqs": self.state.options.max_num_seqs, "policy": "fcfs"}
            self._json({"vllm_config": {"scheduler_config": scheduler, "cache_config": {"block_size": 16}}})
            if "die_after_ready" in self.state.faults:  # this is the last thing that is asked before a use
                self.wfile.flush()
                os._exit(0)
        else:
            self._answer(404, b"")

    def do_POST(self) -> None:
        self.asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path.startswith("/reset_prefix_cache"):
            self._reset()
        elif self.path == "/v1/completions":
            self._complete()
        else:
            self._answer(404, b"")

    def _reset(self) -> None:
        if "reset_silent" in self.state.faults:
            self._answer(200, b"")
            return
        limit = self.state.number("reset_refused")
        self.state.refusals += 1
        self._json({"success": limit >= 0 and self.state.refusals > limit})

    def _complete(self) -> None:
        faults = self.state.faults
        with self.state.lock:
            self.state.completions += 1
            number = self.state.completions
        if "die_in_window" in faults and number > 1:
            print(WORDS.get(faults["die_in_window"], WORDS["engine_dead"]), flush=True)
            os._exit(0)
        if (number > 1 and ("freeze" in faults or "thrash" in faults)) or "hang_streams" in faults:
            time.sleep(600)
        if "answer_500" in faults:
            self._answer(500, b'{"error": "EngineCore encountered an issue"}')
            return
        slow = number <= self.state.number("slow_first")
        if slow:
            time.sleep(0.4)
        body = self._stream(slow)
        if "cut_streams" in faults:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:20])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._answer(200, body, "text/event-stream")

    def _stream(self, slow: bool) -> bytes:
        """A whole answer; one that was slow says so by claiming one cached token."""
        prompt, tokens = len(self.asked["prompt"]), int(self.asked["max_tokens"])
        events = []
        for done in range(1, tokens + 1):
            choice = {"index": 0, "text": "x", "finish_reason": "length" if done == tokens else None}
            events.append({"choices": [choice], "usage": usage(prompt, done, slow)})
        events.append({"choices": [], "usage": usage(prompt, tokens, slow)})
        self.state.iterations += tokens
        return b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in events) + b"data: [DONE]\n\n"

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def usage(prompt: int, tokens: int, slow: bool) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": int(slow)},
    }


class Server(ThreadingHTTPServer):
    """Threads that never keep the process alive; SO_REUSEPORT on order, as old vLLM did."""

    daemon_threads = True
    reuse_port = False

    def server_bind(self) -> None:
        if self.reuse_port:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


def child(words: str, *, session: bool = False, keep: tuple[int, ...] = ()) -> None:
    """A child that ignores SIGTERM and its parent's death."""
    code = f"import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {words}time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=session, pass_fds=keep)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """vLLM's argv as far as the tests use it; an unknown flag ends with exit code 2 and argparse's words."""
    parser = argparse.ArgumentParser(prog="api_server.py")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--scheduling-policy", choices=["fcfs", "priority"], default="fcfs")
    parser.add_argument("--fault", action="append", default=[])
    return parser.parse_args(arguments)


def swallow(times: int) -> None:
    """Ignore the first SIGTERMs, then end with 0."""
    left = [times]

    def handler(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(0)

    signal.signal(signal.SIGTERM, handler)


def say(faults: dict[str, str]) -> None:
    """What it writes while starting."""
    if "secret" in faults:
        print(f"api_key='{os.environ['MY_API_KEY']}' Authorization: Bearer abc.def", flush=True)
        print("Received request cmpl-1: prompt: 'the secret plan', params: SamplingParams()", flush=True)
    for number in range(int(faults.get("flood", 0))):
        print(f"line {number} " + "x" * 1000)
    if "v0" in faults:
        print(V0, flush=True)
    if "compile_once" in faults and not Path(faults["compile_once"]).exists():
        Path(faults["compile_once"]).touch()
        faults["kv_tokens"] = "3888"
        print("INFO 11-27 22:16:30 [backends.py:399] Compiling a graph for compile range (1, 8) takes 9.00 s")
    sys.stdout.flush()


def leave(faults: dict[str, str]) -> None:
    """What it leaves behind: children, files."""
    if "grandchild" in faults:
        child("", session=True)
    if "child" in faults:
        child("")
    if "shm" in faults:
        Path("/dev/shm", faults["shm"]).write_bytes(b"0" * 4096)
    if "scratch" in faults:
        Path(os.environ["TMPDIR"], "scratch").write_text("left behind")


def before_ready(faults: dict[str, str]) -> None:
    """Faults of start-up."""
    if "swallow_sigterm" in faults:
        swallow(int(faults["swallow_sigterm"] or 1))
    leave(faults)
    say(faults)
    if "print" in faults:
        for kind in faults["print"].split("+"):
            print(f"(EngineCore pid=1) ERROR 11-27 22:20:57 [core.py:1] {WORDS[kind]}", flush=True)
        print(WRAPPER, flush=True)
        sys.exit(1)
    if "exit" in faults:
        sys.exit(int(faults["exit"]))
    if "hang" in faults:
        time.sleep(600)


def main() -> None:
    options = parse()
    state = State(options)
    before_ready(state.faults)
    if "wrong_name" in state.faults:
        state.names = ["another"]
    Handler.state = state
    Server.reuse_port = "reuse_port" in state.faults
    server = Server((options.host, options.port), Handler)
    if "keep_port" in state.faults:
        os.set_inheritable(server.fileno(), True)
        child("", session=True, keep=(server.fileno(),))
    server.serve_forever()


if __name__ == "__main__":
    main()
