"""Public data as it was published: `tests/data/public` holds it compressed, with its origin and licence."""

import lzma
import tempfile
from functools import cache
from pathlib import Path

PACKED = Path(__file__).parent / "data" / "public"


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="tuner-public-data-")


@cache
def public(name: str) -> Path:
    """The file of this name under `tests/data/public`, unpacked once a process."""
    packed = PACKED / f"{name}.xz"
    if not packed.exists():
        assert (PACKED / name).is_file(), f"tests/data/public has no {name}"
        return PACKED / name
    path = Path(_folder().name, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path
