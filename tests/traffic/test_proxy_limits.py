"""What clients of the recording proxy may send, and for how long: it may stand before production."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.traffic.test_proxy import BODY, WATCHDOG_S, WHOLE, ask, between, talk
from tuner.traffic.capture import proxy, upstream

CLOSE = b"connection: close\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
UPGRADE = b"Upgrade: x\r\nConnection: upgrade\r\n"
Attack = Callable[[int], Awaitable[bytes]]


async def whole(number: int, asked: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(WHOLE)


async def slow(number: int, asked: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.3)
    writer.write(WHOLE)


def attacked(file: Path, attack: Attack, answer: object = whole) -> tuple[bytes, bytes, list[bytes]]:
    """What an attacker gets, what another client gets after it, and the heads that the upstream saw."""

    async def go() -> tuple[bytes, bytes, list[bytes]]:
        async with asyncio.timeout(WATCHDOG_S), between(answer, file) as (port, heads):  # type: ignore[arg-type]
            got = await attack(port)
            return got, await talk(port, ask(headers=CLOSE)), heads

    return asyncio.run(go())


def sends(data: bytes) -> Attack:
    """Sends everything and takes what comes until the other side closes."""

    async def attack(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        got = b""
        try:
            writer.write(data)
            got = await asyncio.wait_for(reader.read(), 60)
        except ConnectionError:
            pass
        writer.close()
        return got

    return attack


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 2**20,
        b"GET /" + b"a" * 2**17 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n",
        b"GET / HTTP/1.1\r\nX-a: " + b"a" * 2**20,
        b"GET / HTTP/1.1\r\n" + CLOSE + b"a:\r\n" * 300 + b"\r\n",
        b"POST / HTTP/1.1\r\n" + CHUNKED + b"\r\n0\r\nX-a: " + b"a" * 2**20 + b"\r\n\r\n",
    ],
    ids=["url", "whole", "header", "headers", "trailer"],
)
def test_20_attack_a_head_of_any_size_is_not_passed_on(tmp_path: Path, data: bytes) -> None:
    began = time.process_time()
    got, after, heads = attacked(tmp_path / "c.jsonl", sends(data))
    assert b" 200 OK" not in got
    assert b" 200 OK" in after
    assert len(heads) == 1
    assert time.process_time() - began < 30


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HT", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n1", ask(), ask() + b"\r\n"],
    ids=["nothing", "head", "body", "kept", "empty line"],
)
def test_20_attack_a_request_that_never_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    for name in ("HEAD_S", "BODY_S", "IDLE_S"):
        monkeypatch.setattr(proxy, name, 0.3, raising=False)
    got, after, _ = attacked(tmp_path / "c.jsonl", sends(data))
    assert got.count(b" 200 OK") == data.count(BODY)
    assert b" 200 OK" in after


@pytest.mark.parametrize("name", ["LARGEST_BODY", "MOST_HELD"])
@pytest.mark.parametrize(
    "framing", [b"Content-Length: 90000\r\n", CHUNKED, UPGRADE + b"Content-Length: 90000\r\n"]
)
def test_20_attack_a_body_of_any_size_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, framing: bytes
) -> None:
    monkeypatch.setattr(proxy, name, 50_000, raising=False)
    chunk = b"%x\r\n" % 90_000 if b"chunked" in framing else b""
    data = b"POST /v1/completions HTTP/1.1\r\n" + framing + b"\r\n" + chunk + b"a" * 90_000
    got, after, heads = attacked(tmp_path / "c.jsonl", sends(data))
    assert got.split(b"\r\n")[0].split()[1] == (b"413" if name == "LARGEST_BODY" else b"503")
    assert b" 200 OK" in after, "its bytes are not counted any more"
    assert len(heads) == 1


def test_20_attack_a_body_of_tiny_chunks_is_a_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    send = upstream.UpstreamConnection.send

    def seen(self: upstream.UpstreamConnection, client: upstream.Client, request: upstream.Request) -> None:
        pieces.append(len(request.body))
        send(self, client, request)

    monkeypatch.setattr(upstream.UpstreamConnection, "send", seen)
    tiny = b"".join(b"1\r\n%c\r\n" % one for one in BODY) + b"0\r\n\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\n" + CLOSE + CHUNKED + b"\r\n"
    got, _, _ = attacked(tmp_path / "c.jsonl", sends(chunked + tiny))
    assert b" 200 OK" in got
    assert pieces == [1, 1]


@pytest.mark.parametrize("headers", [b"", UPGRADE], ids=["plain", "upgrade"])
def test_20_attack_requests_that_wait_are_counted(
    tmp_path: Path, headers: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    many = b"GET / HTTP/1.1\r\n" + headers + b"\r\n"
    got, after, heads = attacked(tmp_path / "c.jsonl", sends(many * 1100), slow)
    assert b" 400 " in got
    assert b" 200 OK" in after
    assert len(heads) <= 2
    assert "failed" not in caplog.text


def test_20_attack_headers_after_a_body_are_not_those_of_the_head(tmp_path: Path) -> None:
    data = b"POST /v1/completions HTTP/1.1\r\n" + CLOSE + CHUNKED + b"\r\n"
    data += b"2\r\n{}\r\n0\r\nAuthorization: Bearer other\r\n\r\n"
    got, _, heads = attacked(tmp_path / "c.jsonl", sends(data))
    assert b" 200 OK" in got
    assert b"authorization" not in heads[0].lower()


def test_20_attack_the_client_that_waits_longest_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "MOST_CLIENTS", 5, raising=False)

    async def crowd(port: int) -> bytes:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        reads = (asyncio.wait_for(reader.read(), 20) for reader, _ in held[:15])
        ended = await asyncio.gather(*reads, return_exceptions=True)
        for _, writer in held:
            writer.close()
        return b"%d" % sum(not isinstance(each, TimeoutError) for each in ended)

    got, after, _ = attacked(tmp_path / "c.jsonl", crowd)
    assert got == b"15"
    assert b" 200 OK" in after
