"""A server whose timing is known: answers OpenAI completions with a fixed first-token delay and fixed gaps.

One thread on one epoll loop. Like an engine it works in steps: tokens leave on a grid of a millisecond, all
that are due at once, and it sleeps in between. A request's arrival is the kernel's own receive stamp
(SO_TIMESTAMPING), so that a busy server makes nobody late; each token is stamped right before the `send` that
carries it, so that the truth is what the kernel was handed, not what was planned. `GET /truth` tells, per
request in order of arrival: [received_ns, first_ns, last_ns, tokens, chunks]; `POST /forget` begins anew.

    python benchmarks/known_server.py --port 0 --first-ms 200 --gap-ms 20 --per-chunk 1
"""

import argparse
import ctypes
import gc
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"server: known\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
SO_TIMESTAMPING, RX_SOFTWARE, SOFTWARE = 37, 1 << 3, 1 << 4
STAMP = struct.Struct("qq")
STEP_NS, TOGETHER_NS = 1_000_000, 20_000
LOOK_EVERY = 64
"""Tokens in a row before the loop looks at its sockets."""


class Stream:
    """One connection: what came in, and the answer it is sending."""

    __slots__ = ("answer", "buffer", "next", "out", "sock", "truth")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.out = b""
        self.answer: list[tuple[int, bytes]] = []
        self.next = 0
        self.truth: list[int] = []


class Timer:
    """A timerfd on the clock of `perf_counter_ns`; it rings when its descriptor can be read."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self.fd = int(self._libc.timerfd_create(1, os.O_CLOEXEC))

    def ring(self, at_ns: int) -> int:
        """Ring at an instant, and never before; the instant."""
        seconds, rest = divmod(at_ns, 1_000_000_000)
        self._libc.timerfd_settime(self.fd, 1, (ctypes.c_long * 4)(0, 0, seconds, rest), None)
        return at_ns


class Server:
    """The epoll loop. `first_s`, `gap_s` and `per_chunk` hold for every request.

    Delays are the same for all, so that what is due first was planned first: two queues in order of time.
    """

    def __init__(self, port: int, first_s: float, gap_s: float, per_chunk: int) -> None:
        self.first_ns, self.gap_ns, self.per_chunk = int(first_s * 1e9), int(gap_s * 1e9), per_chunk
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        self.timer = Timer()
        self.epoll.register(self.timer.fd, select.EPOLLIN)
        self.streams: dict[int, Stream] = {}
        self.firsts: deque[tuple[int, Stream]] = deque()
        self.later: deque[tuple[int, Stream]] = deque()
        self.answers: dict[tuple[int, int, bool], list[tuple[int, bytes]]] = {}
        self.truths: list[list[int]] = []
        self.most = 0

    def run(self) -> None:
        poll, firsts, later, clock = self.epoll.poll, self.firsts, self.later, time.perf_counter_ns
        ringing = 0
        while True:
            wait = -1.0
            for _ in range(LOOK_EVERY):
                queue = firsts if not later or (firsts and firsts[0][0] <= later[0][0]) else later
                if not queue:
                    break
                due = queue[0][0]
                if due > clock():
                    if due != ringing:
                        ringing = self.timer.ring(due)
                    break
                self.token(*queue.popleft())
            else:
                wait = 0.0
            for fd, happened in poll(wait, 512):
                if fd == self.timer.fd:
                    os.read(fd, 8)
                elif fd == self.listener.fileno():
                    self.accept()
                elif fd in self.streams:
                    self.ready(self.streams[fd], happened)

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE | SOFTWARE)
            self.streams[sock.fileno()] = Stream(sock)
            self.epoll.register(sock, select.EPOLLIN)

    def ready(self, stream: Stream, happened: int) -> None:
        if happened & select.EPOLLOUT and stream.out:
            self.send(stream, b"")
        if not happened & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data, said, _, _ = stream.sock.recvmsg(1 << 18, 256)
        except BlockingIOError:
            return
        except OSError:
            data, said = b"", []
        if not data:
            self.drop(stream)
            return
        stream.buffer += data
        self.request(stream, received(said))

    def drop(self, stream: Stream) -> None:
        if self.streams.pop(stream.sock.fileno(), None) is not None:
            self.epoll.unregister(stream.sock)
            stream.sock.close()

    def request(self, stream: Stream, now: int) -> None:
        head, found, rest = stream.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        low = head.lower()
        length = int(low.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in low else 0
        if len(rest) < length:
            return
        body, stream.buffer = rest[:length], rest[length:]
        path = head.split(b" ", 2)[1].split(b"?")[0]
        if head.startswith(b"POST") and path.endswith(b"completions"):
            self.start(stream, body, path.endswith(b"chat/completions"), now)
            return
        self.send(stream, self.page(path))

    def page(self, path: bytes) -> bytes:
        said: object = {}
        if path == b"/truth":
            said = {"requests": self.truths, "most_in_flight": self.most, "cpu_s": time.process_time()}
        elif path == b"/forget":
            self.truths, self.most = [], 0
        elif path == b"/v1/models":
            said = {"object": "list", "data": [{"id": "known", "object": "model", "max_model_len": 32768}]}
        elif path == b"/metrics":
            said = None
        text = b"# nothing\n" if said is None else json.dumps(said).encode()
        kind = b"text/plain" if said is None else b"application/json"
        return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
            kind,
            len(text),
            text,
        )

    def start(self, stream: Stream, body: bytes, chat: bool, now: int) -> None:
        asked = json.loads(body)
        total = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        prompt = asked.get("prompt", "")
        length = len(prompt) if isinstance(prompt, list) else 1 + str(asked).count(" ")
        stream.answer, stream.next = self.answer(length, total, chat), 0
        stream.truth = [now, 0, 0, 0, 0]
        self.truths.append(stream.truth)
        self.send(stream, HEAD)
        self.firsts.append((-(-(now + self.first_ns) // STEP_NS) * STEP_NS, stream))
        self.most = max(self.most, len(self.firsts) + len(self.later))

    def token(self, at: int, stream: Stream) -> None:
        """Send the chunk that is due, and plan the next at its absolute time."""
        if stream.sock.fileno() < 0:
            return
        done, data = stream.answer[stream.next]
        stream.next += 1
        truth = stream.truth
        if stream.next < len(stream.answer):
            self.later.append((at + self.gap_ns, stream))
        truth[3], truth[4] = done, stream.next
        truth[2] = now = time.perf_counter_ns()
        if not truth[1]:
            truth[1] = now
        self.send(stream, data)

    def answer(self, prompt: int, total: int, chat: bool) -> list[tuple[int, bytes]]:
        """The chunks of an answer: (tokens so far, bytes). The same for all that ask for the same."""
        found = self.answers.get((prompt, total, chat))
        if found is None:
            found = []
            for done in range(self.per_chunk, total + self.per_chunk, self.per_chunk):
                fresh, done = self.per_chunk - max(0, done - total), min(done, total)
                data = event(prompt, done, chat, " w" * fresh, "length" if done == total else None)
                if done == total:
                    data += event(prompt, done, chat, None, None) + END
                found.append((done, data))
            self.answers[prompt, total, chat] = found
        return found

    def send(self, stream: Stream, data: bytes) -> None:
        out = stream.out + data if stream.out else data
        try:
            sent = stream.sock.send(out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.drop(stream)
            return
        if sent < len(out) or stream.out:
            stream.out = out[sent:]
            self.epoll.modify(stream.sock, select.EPOLLIN | (select.EPOLLOUT if stream.out else 0))


def received(said: list[tuple[int, int, bytes]]) -> int:
    """When the kernel received it, as perf_counter_ns (its stamps are of the wall clock); now without one."""
    now, wall = time.perf_counter_ns(), time.time_ns()
    while (then := time.perf_counter_ns()) - now > TOGETHER_NS:  # interrupted between the two clocks
        now, wall = then, time.time_ns()
    for _, kind, data in said:
        if kind == SO_TIMESTAMPING and len(data) >= STAMP.size:
            seconds, nanoseconds = STAMP.unpack_from(data)
            if seconds:
                return now - (wall - seconds * 1_000_000_000 - nanoseconds)
    return now


def event(prompt: int, done: int, chat: bool, text: str | None, finish: str | None) -> bytes:
    """One event as an HTTP chunk."""
    why = f'"{finish}"' if finish else "null"
    kind, choices = "chat.completion.chunk" if chat else "text_completion", "[]"
    if text is not None:
        said = f'"delta":{{"content":"{text}"}}' if chat else f'"text":"{text}"'
        choices = f'[{{"index":0,{said},"logprobs":null,"finish_reason":{why},"stop_reason":null}}]'
    data = (
        f'data: {{"id":"cmpl-known","object":"{kind}","created":1700000000,"model":"known",'
        f'"choices":{choices},"usage":{{"prompt_tokens":{prompt},'
        f'"total_tokens":{prompt + done},"completion_tokens":{done}}}}}\n\n'
    ).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=200.0)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    parser.add_argument("--per-chunk", type=int, default=1)
    parser.add_argument("--core", type=int, default=None)
    asked = parser.parse_args()
    if asked.core is not None:
        os.sched_setaffinity(0, {asked.core})
    server = Server(asked.port, asked.first_ms / 1000, asked.gap_ms / 1000, asked.per_chunk)
    print(server.port, flush=True)
    gc.freeze()
    gc.disable()
    try:
        server.run()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
