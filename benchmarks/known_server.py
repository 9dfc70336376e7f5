"""A server whose timing is known: answers OpenAI completions with a fixed first-token delay and fixed gaps.

One thread on one epoll loop; each token is stamped right before the `send` that carries it, so that the
truth is what the kernel was handed, not what was planned. `GET /truth` tells, per request in order of
arrival: [received_ns, first_ns, last_ns, tokens, chunks]; `POST /forget` starts a new list.

    python benchmarks/known_server.py --port 0 --first-ms 200 --gap-ms 20 --per-chunk 1
"""

import argparse
import heapq
import json
import os
import select
import socket
import sys
import time

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"server: known\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Stream:
    """One connection: what came in, and the answer it is sending."""

    __slots__ = ("buffer", "chat", "done", "out", "prompt", "sock", "total", "truth")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.out = b""
        self.done = self.total = self.prompt = 0
        self.chat = False
        self.truth: list[int] = []


class Server:
    """The epoll loop. `first_s`, `gap_s` and `per_chunk` hold for every request."""

    def __init__(self, port: int, first_s: float, gap_s: float, per_chunk: int) -> None:
        self.first_ns, self.gap_ns, self.per_chunk = int(first_s * 1e9), int(gap_s * 1e9), per_chunk
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        self.streams: dict[int, Stream] = {}
        self.due: list[tuple[int, int, Stream]] = []
        self.truths: list[list[int]] = []
        self.number = 0
        self.most = 0

    def run(self) -> None:
        while True:
            now = time.perf_counter_ns()
            while self.due and self.due[0][0] <= now:
                at, _, stream = heapq.heappop(self.due)
                self.token(stream, at)
                now = time.perf_counter_ns()
            wait = max(0.0, (self.due[0][0] - now) / 1e9 - 0.0002) if self.due else 1.0
            for fd, happened in self.epoll.poll(wait if wait > 0.0005 else 0, 512):
                if fd == self.listener.fileno():
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
            self.streams[sock.fileno()] = Stream(sock)
            self.epoll.register(sock, select.EPOLLIN)

    def ready(self, stream: Stream, happened: int) -> None:
        if happened & select.EPOLLOUT and stream.out:
            self.send(stream, b"")
        if not happened & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = stream.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(stream)
            return
        now = time.perf_counter_ns()
        stream.buffer += data
        self.request(stream, now)

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
        stream.total = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        prompt = asked.get("prompt", "")
        stream.prompt = len(prompt) if isinstance(prompt, list) else 1 + str(asked).count(" ")
        stream.chat, stream.done = chat, 0
        stream.truth = [now, 0, 0, 0, 0]
        self.truths.append(stream.truth)
        self.most = max(self.most, sum(1 for _ in self.due) + 1)
        self.send(stream, HEAD)
        self.schedule(stream, now + self.first_ns)

    def schedule(self, stream: Stream, at: int) -> None:
        self.number += 1
        heapq.heappush(self.due, (at, self.number, stream))

    def token(self, stream: Stream, at: int) -> None:
        """Send the chunk that is due, and plan the next at its absolute time."""
        if stream.sock.fileno() < 0:
            return
        fresh = min(self.per_chunk, stream.total - stream.done)
        stream.done += fresh
        over = stream.done >= stream.total
        data = self.event(stream, " w" * fresh, "length" if over else None)
        if over:
            data += self.event(stream, None, None) + END
        now = time.perf_counter_ns()
        truth = stream.truth
        truth[1] = truth[1] or now
        truth[2] = now
        truth[3] = stream.done
        truth[4] += 1
        self.send(stream, data)
        if not over:
            self.schedule(stream, at + self.gap_ns)

    def event(self, stream: Stream, text: str | None, finish: str | None) -> bytes:
        why = f'"{finish}"' if finish else "null"
        kind, choices = "text_completion", "[]"
        if stream.chat:
            kind = "chat.completion.chunk"
        if text is not None:
            said = f'"delta":{{"content":"{text}"}}' if stream.chat else f'"text":"{text}"'
            choices = f'[{{"index":0,{said},"logprobs":null,"finish_reason":{why},"stop_reason":null}}]'
        data = (
            f'data: {{"id":"cmpl-known","object":"{kind}","created":1700000000,"model":"known",'
            f'"choices":{choices},"usage":{{"prompt_tokens":{stream.prompt},'
            f'"total_tokens":{stream.prompt + stream.done},"completion_tokens":{stream.done}}}}}\n\n'
        ).encode()
        return b"%x\r\n%s\r\n" % (len(data), data)

    def send(self, stream: Stream, data: bytes) -> None:
        stream.out += data
        try:
            sent = stream.sock.send(stream.out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.drop(stream)
            return
        stream.out = stream.out[sent:]
        want = select.EPOLLIN | (select.EPOLLOUT if stream.out else 0)
        if stream.out or sent < len(data):
            self.epoll.modify(stream.sock, want)


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
    import gc

    gc.freeze()
    gc.disable()
    try:
        server.run()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
