"""Hostile uploads of every format, against a real service: it stays small and answers meanwhile.

Each file is small to send and large, deep or false inside. Read in the service, 7.5 MB of constant columns
took 6.8 GB and a line of gzip 3.4 GB. Files are made when they are sent, two at a time.
"""

import gzip
import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.service.world import Server, serving
from tests.traffic.formats import FORMATS
from tuner.traffic.trace import COLUMNS

MOST_MIB = 512
MIB = 1024**2
Content = Callable[[], bytes]
HEADS = {name: text.strip().splitlines()[0] for name, (text, _) in FORMATS.items()}
JSONS = ("mooncake", "aiperf", "bailian", "otlp", "openai", "tracelab", "capture")


def packed(*pieces: tuple[bytes, int]) -> bytes:
    """Gzip of pieces, each repeated so many times: a member for each, so that none is unpacked here."""
    return b"".join(gzip.compress(piece, 9) * times for piece, times in pieces)


def table(
    rows: int, meta: bytes = b'{"version":1,"digest":"x","block_size":0,"meta":{}}', **other: pa.Array
) -> bytes:
    """A trace's columns, all constant, in the fewest bytes."""
    made = {name: pa.array(np.full(rows, -(name == "parent"), kind)) for name, (kind, _) in COLUMNS.items()}
    made["blocks"] = pa.LargeListArray.from_arrays(
        pa.array(np.zeros(rows + 1, np.int64)), pa.array([], pa.int64())
    )
    made |= other
    out = io.BytesIO()
    content = pa.table(made).replace_schema_metadata({b"tuner": meta} if meta else None)
    pq.write_table(content, out, compression="zstd", use_dictionary=True)
    return out.getvalue()


def constant(rows: int) -> bytes:
    """A Parquet file of so many rows in many groups of one constant, made a group at a time."""
    group = pq.read_table(io.BytesIO(table(2_000_000)))
    out = io.BytesIO()
    with pq.ParquetWriter(out, group.schema, compression="zstd", use_dictionary=True) as writer:
        for _ in range(rows // len(group)):
            writer.write_table(group)
    return out.getvalue()


def long_lines() -> Iterator[tuple[str, Content]]:
    """One line of 600 MB that unpacks from less than 1 MB, where the format's first line stands before it."""
    for name in FORMATS:
        head = f"{HEADS[name]}\n".encode()
        yield f"{name}: a line without end", partial(packed, (head, 1), (b" " * MIB, 600))


def many_lines() -> Iterator[tuple[str, Content]]:
    """A row of 60 KB again and again, 200 MB of it."""

    def rows(name: str, old: bytes) -> bytes:
        line = FORMATS[name][0].strip().splitlines()[name == "azure"].encode()
        row = line.replace(old, old + b" " * 60_000, 1) + b"\n"
        return packed((f"{HEADS[name]}\n".encode(), 1), (row * 17, 200))

    for name, old in (("azure", b"374"), ("mooncake", b"1500"), ("bailian", b"159")):
        yield f"{name}: a row for ever", partial(rows, name, old)


def not_text() -> Iterator[tuple[str, Content]]:
    for name in FORMATS:
        head = HEADS[name].encode()
        yield f"{name}: no text", partial(bytes, head + b"\n\xff\xfe" + bytes(range(256)) * 99)


def deep() -> Iterator[tuple[str, Content]]:
    """JSON that is deep, or many small values in one line."""
    for name in JSONS:
        head = HEADS[name]
        key = next(iter(json.loads(head)))
        yield f"{name}: depth", partial(bytes, f'{{"{key}": {"[" * 200_000}'.encode())
        cells = b"[]," * (MIB // 2) + b"[]"
        yield (
            f"{name}: many values in a line",
            partial(bytes, head[:-1].encode() + b', "x": [' + cells + b"]},\n"),
        )


def documents() -> Iterator[tuple[str, Content]]:
    """Documents without end, and tables that are wrong."""
    space, azure = b" " * MIB, HEADS["azure"].encode() + b"\n"
    yield "a list of lists", lambda: b"[" * 5_000_000
    yield (
        "a list without end",
        lambda: packed((b'[{"timestamp": 1, "input_length": 1, "output_length": 1}', 1), (space, 900)),
    )
    yield "a list of text without end", lambda: packed((b'[{"x": "', 1), (b"a" * MIB, 900))
    yield (
        "a document without end",
        lambda: packed((b'{"resourceSpans": [\n', 1), (b"[],\n" * (MIB // 4), 900)),
    )
    yield "a number without end", lambda: b'{"timestamp": ' + b"9" * MIB + b', "input_length": 1}'
    yield "a CSV of empty columns", lambda: azure + b"," * (3 * MIB)
    yield "a CSV header of many columns", lambda: b",".join(b"c%d" % n for n in range(900_000))
    yield "a CSV cell over many lines", lambda: azure + b'"' + b"a\n" * MIB
    yield "a CSV row of many cells over many lines", lambda: azure + b'"a\n",' * MIB


def logs_and_archives() -> Iterator[tuple[str, Content]]:
    """Archives in archives, and logs that cost more to match than to send."""
    yield "zeros", lambda: packed((b"\0" * MIB, 1500))
    yield "gzip in gzip", lambda: packed((packed((b"\0" * MIB, 100)), 1))
    yield "gzip cut short", lambda: packed((b"\0" * MIB, 10))[:500]
    received = b"INFO 01-01 00:00:00 Received request a: "
    slow = b", params: SamplingParams(" * 20_000
    yield "a log line that is matched slowly", lambda: received + b"prompt: " + slow + b"\n"
    ids = b"DEBUG 01-01 00:00:00 Request a details: prompt_token_ids: [" + b"1, " * MIB
    yield "a log of many ids", lambda: received + b"x\n" + ids + b"], prompt_embeds\n"
    runs = "[0, 9999999]," * 99
    line = f'{HEADS["capture"]}\n{{"r": 1, "t": 1, "i": 2, "b": [{runs}[0,1]]}}\n'
    yield "runs of blocks", lambda: line.encode()


def parquets() -> Iterator[tuple[str, Content]]:
    """Parquet files of many rows, columns, groups, notes, or of what a trace does not hold."""
    note = {"version": 1, "digest": "", "block_size": 0, "meta": {"x": "a" * 9_000_000}}
    yield "parquet: many groups of constant rows", lambda: constant(6_000_000)
    yield "parquet: 2 million constant rows", lambda: constant(2_000_000)
    yield "parquet: no notes", lambda: table(9, b"")
    yield "parquet: notes without end", lambda: table(9, b"[" * 200_000)
    yield "parquet: a large note", lambda: table(9, json.dumps(note).encode())
    yield (
        "parquet: text in place of numbers",
        lambda: table(4096, client=pa.array(["a" * MIB] * 4096).dictionary_encode()),
    )
    yield "parquet: lists in place of numbers", lambda: table(9, client=pa.array([[[0] * 1000] * 100] * 9))
    yield "parquet: lists of text as blocks", lambda: table(9, blocks=pa.array([["a" * 9000]] * 9))
    yield "parquet: negative lengths", lambda: table(9, input_len=pa.array(np.full(9, -5, np.int32)))
    yield "parquet: parents before the first", lambda: table(9, parent=pa.array(np.full(9, -7, np.int64)))
    beyond = (2**31 - 1).to_bytes(4, "little") + b"PAR1"
    yield "parquet: a footer larger than the file", lambda: table(1000)[:-8] + beyond
    yield "parquet: cut", lambda: (whole := table(1000))[: len(whole) // 2]
    yield "parquet: only its marks", lambda: b"PAR1" + bytes(4) + b"PAR1"
    yield "parquet: twenty thousand columns", columns


def columns() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({f"c{n}": pa.array([0]) for n in range(20_000)}), out)
    return out.getvalue()


FAMILIES = (long_lines, many_lines, not_text, deep, documents, logs_and_archives, parquets)
QUICK = (not_text, logs_and_archives)
"""The others unpack gigabytes."""


def send(client: httpx.Client, content: bytes) -> httpx.Response:
    begin = {"name": "sent", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    upload = client.post("/v1/traces/uploads", json=begin).json()
    where = f"/v1/traces/uploads/{upload['id']}"
    step = int(upload["largest_piece"])
    for at in range(0, len(content), step):
        piece = client.patch(where, content=content[at : at + step], headers={"Upload-Offset": str(at)})
        assert piece.status_code == 200, piece.text
    return client.post(f"{where}/finish")


class Watch:
    """Asks the service for its health all the while, and looks at its size."""

    def __init__(self, server: Server) -> None:
        self.largest, self.answers, self.wrong = 0, 0, list[object]()
        self._server, self._process = server, psutil.Process(server.process.pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        with self._server.client() as client:
            while not self._over.wait(0.02):
                self.largest = max(self.largest, self._process.memory_info().rss)
                answer = client.get("/healthz")
                self.answers += 1
                if answer.status_code != 200:
                    self.wrong.append(answer.text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("home")) as found:
        yield found


def test_there_are_sixty_files_and_more_of_different_names() -> None:
    names = [name for family in FAMILIES for name, _ in family()]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.__name__, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES],
)
def test_hostile_uploads_neither_fill_nor_stop_the_service(
    family: Callable[[], Iterator[tuple[str, Content]]], server: Server
) -> None:
    def refused(watch: Watch, name: str, content: Content) -> str:
        made = content()
        before = watch.answers
        with server.client() as client:
            answer = send(client, made)
        said = f"{name}: {answer.status_code} {answer.json().get('detail', '')}"
        assert answer.status_code == 400, said
        assert str(server.home) not in said
        assert watch.answers > before, f"{name}: the service answered nobody else"
        return said

    with Watch(server) as watch, ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(refused, watch, *each) for each in family()]:
            print(done.result())
    print(f"at most {watch.largest // MIB} MiB, {watch.answers} other answers")
    assert not watch.wrong
    assert 0 < watch.largest <= MOST_MIB * MIB
    with server.client() as client:
        fine = send(client, FORMATS["azure"][0].encode())
    assert fine.status_code == 201, fine.text
    assert not list((server.home / "uploads").glob("*"))
