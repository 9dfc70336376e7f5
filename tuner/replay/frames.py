"""Frames between the processes of a replay: kind (1 byte), length (4), payload."""

import asyncio
import struct

_HEAD = struct.Struct("<cI")


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame, ready to write."""
    return _HEAD.pack(kind, len(payload)) + payload


async def read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(kind, payload) of the next frame. asyncio.IncompleteReadError where the other side has ended."""
    kind, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return kind, await reader.readexactly(length)
