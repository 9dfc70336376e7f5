"""The command line without its start-up: one process imports the tuner, and forks for each command.

Such a command is a process of its own, with its own arguments, environment, folder, output and exit code, as
after `python -m tuner`. Only the imports are not repeated, which are most of a short command's CPU time.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import tuner

LEFT_OUT = ("tuner.__main__", "tuner.engine.live_limits")
"""The program itself, and what needs vLLM."""


def run(
    words: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run([python, "-m", "tuner", *words], capture_output=True, text=True)`."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line,
    ):
        line.settimeout(timeout_s)
        line.connect(_server())
        request = json.dumps({"words": list(words), "env": dict(env), "cwd": str(cwd or Path.cwd())})
        socket.send_fds(line, [b"1"], [out.fileno(), err.fileno()])
        line.sendall(request.encode())
        line.shutdown(socket.SHUT_WR)
        code = int(line.recv(16))
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([*words], code, out.read(), err.read())


@cache
def _server() -> str:
    """Where the warm process of this test process listens; it ends with us."""
    folder = tempfile.TemporaryDirectory(prefix="tuner-warm-")
    path = f"{folder.name}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", path],
        cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def close(server: "subprocess.Popen[bytes]" = process) -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(60)
        folder.cleanup()

    atexit.register(close)
    return path


def _import_all() -> None:
    for module in pkgutil.walk_packages(tuner.__path__, "tuner."):
        if module.name not in LEFT_OUT:
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def _accept(path: str) -> socket.socket | None:
    """The connection of one command, in a process of its own; None when our test process has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin.buffer], [], [])
            if sys.stdin.buffer in ready:
                return None
            line, _ = listener.accept()
            if os.fork() == 0:
                return line
            line.close()


def _become(line: socket.socket) -> bool:
    """Fork once more: True in the process that is to be the command. The other one reports its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, (out, err), _, _ = socket.recv_fds(line, 1, 2)
    text = b"".join(iter(lambda: line.recv(65536), b""))
    given = json.loads(text)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        line.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    line.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, out, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    sys.argv[1:] = given["words"]
    return True


if __name__ == "__main__":
    _import_all()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if (connection := _accept(sys.argv[1])) and _become(connection):
        runpy.run_module("tuner", run_name="__main__", alter_sys=True)
