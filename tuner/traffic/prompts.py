"""Makes prompts from block ids: exact lengths and shared prefixes as in production, but none of its text."""

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from tuner.traffic.trace import Trace

# Fragments that are kept: 48 MiB, counting eight bytes for each token.
_CACHE_BYTES = 48 << 20
_BYTES_PER_TOKEN = 8


def salt(study_seed: int, number: int, repeat: int) -> bytes:
    """16 bytes for one (study seed, trial number, repeat); other numbers give prompts that share no block."""
    return hashlib.blake2b(f"{study_seed}/{number}/{repeat}".encode(), digest_size=16).digest()


def plain_range(vocabulary: int) -> tuple[int, int]:
    """The half-open range of token ids that prompts use: without the ends, where special tokens live.

    Control tokens are the first (up to 1,000) or the last (up to 2 %) ids of the usual vocabularies.
    ValueError below 64.
    """
    if vocabulary < 64:
        raise ValueError(f"a vocabulary of {vocabulary} tokens is too small for prompts that differ")
    return (1000 if vocabulary >= 8192 else 10), vocabulary - vocabulary // 50


class Prompts:
    """The prompts of a trace for one salt; the same bytes in any process, at any time.

    A block id gives the same tokens everywhere (a partial block: the first of them); the rest of a prompt is
    unique to the row. It keeps a bounded cache of JSON fragments.
    """

    def __init__(self, trace: Trace, vocabulary: int, salt: bytes) -> None:
        self.trace = trace
        self._low, high = plain_range(vocabulary)
        self._span = np.uint64(high - self._low)
        self._salt = salt
        self._fragments: OrderedDict[int, bytes] = OrderedDict()
        self._most = max(16, _CACHE_BYTES // (_BYTES_PER_TOKEN * max(1, trace.block_size)))

    def tokens(self, row: int) -> NDArray[np.int32]:
        """Token ids of a row's prompt, int32[input_len]."""
        size, length = self.trace.block_size, int(self.trace.input_len[row])
        parts = [self._draw(b"block", int(block), size) for block in self.trace.row_blocks(row)]
        covered = min(length, size * len(parts))
        parts.append(self._draw(b"row", row, length - covered))
        return np.concatenate(parts)[:length] if covered == length else np.concatenate(parts)

    def token_json(self, row: int) -> bytes:
        """The same prompt as a JSON list, put together from ready fragments."""
        size, length = self.trace.block_size, int(self.trace.input_len[row])
        ids = self.trace.row_blocks(row)
        whole = min(len(ids), length // size) if size else 0
        parts = [self._fragment(int(block)) for block in ids[:whole]]
        left = length - whole * size
        if left and whole < len(ids):
            parts.append(_text(self._draw(b"block", int(ids[whole]), size)[:left]))
        elif left:
            parts.append(_text(self._draw(b"row", row, left)))
        return b"[" + b",".join(parts) + b"]"

    def _fragment(self, block: int) -> bytes:
        found = self._fragments.get(block)
        if found is not None:
            self._fragments.move_to_end(block)
            return found
        made = _text(self._draw(b"block", block, self.trace.block_size))
        self._fragments[block] = made
        if len(self._fragments) > self._most:
            self._fragments.popitem(last=False)
        return made

    def _draw(self, kind: bytes, number: int, count: int) -> NDArray[np.int32]:
        """`count` token ids: BLAKE2b keyed by the salt gives a seed, SHAKE-128 stretches it."""
        seed = hashlib.blake2b(kind + b"%d" % number, key=self._salt, digest_size=32).digest()
        raw = np.frombuffer(hashlib.shake_128(seed).digest(4 * count), "<u4").astype(np.uint64)
        return ((raw * self._span >> np.uint64(32)) + np.uint64(self._low)).astype(np.int32)


def tokens(trace: Trace, row: int, salt: bytes, vocabulary: int) -> NDArray[np.int32]:
    """One prompt without keeping a `Prompts`: int32[input_len]."""
    return Prompts(trace, vocabulary, salt).tokens(row)


def _text(ids: NDArray[np.int32]) -> bytes:
    return ",".join(map(str, ids.tolist())).encode()
