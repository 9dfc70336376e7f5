"""Equality without content: keyed chained hashes of blocks, numbered as they appear; no key is stored."""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

TOKEN_BLOCK = 16  # vLLM's default block size, so that blocks fit those of the engine
MOST_BLOCKS_OF_A_PROMPT = 4_000_000  # 64 million tokens: more is a damaged file

# Without a tokenizer, so many bytes count as one token.
BYTES_PER_TOKEN = 4


class Fingerprints:
    """Block and name numbers of one capture. After `destroy` nothing can be compared with it any more.

    `most` bounds memory: the hashes used longest ago are forgotten (and get a new number when seen again).
    """

    def __init__(self, *, block_size: int = TOKEN_BLOCK, most: int = 2_000_000) -> None:
        self.block_size = block_size
        self._key = bytearray(secrets.token_bytes(32))
        self._most = most
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._names: dict[str, dict[bytes, int]] = {}
        self._next = 0

    def blocks(self, tokens: Sequence[int], context: str = "") -> list[int]:
        """Numbers of the complete blocks of these tokens; equal number, equal tokens from the very start.

        `context` is what else the engine's cache depends on (adapter, cache salt). A partial last block is
        left out.
        """
        try:
            raw = array("q", tokens).tobytes()
        except (TypeError, OverflowError):
            return []
        return self._chain(raw, 8 * self.block_size, context)

    def text_blocks(self, text: bytes, context: str = "") -> list[int]:
        """The same for text without a tokenizer: BYTES_PER_TOKEN bytes count as one token."""
        return self._chain(text, BYTES_PER_TOKEN * self.block_size, context)

    def name(self, kind: str, text: str) -> int:
        """The number of a client, session or model by first appearance; the text itself is not stored."""
        known = self._names.setdefault(kind, {})
        digest = blake2b(f"{kind}\0{text}".encode("utf-8", "replace"), key=self._key, digest_size=16).digest()
        return known.setdefault(digest, len(known))

    def destroy(self) -> None:
        """Overwrite the key and forget every hash."""
        for place in range(len(self._key)):
            self._key[place] = 0
        self._numbers.clear()
        self._names.clear()

    def _chain(self, raw: bytes, width: int, context: str) -> list[int]:
        link = blake2b(context.encode("utf-8", "replace"), key=self._key, digest_size=16).digest()
        found: list[int] = []
        for start in range(0, len(raw) - width + 1, width):
            link = blake2b(link + raw[start : start + width], key=self._key, digest_size=16).digest()
            number = self._numbers.get(link)
            if number is None:
                number = self._numbers[link] = self._next
                self._next += 1
                if len(self._numbers) > self._most:
                    self._numbers.popitem(last=False)
            else:
                self._numbers.move_to_end(link)
            found.append(number)
        return found


def runs(ids: Sequence[int]) -> list[list[int]]:
    """Ids as [start, length] runs of consecutive numbers: short, because new blocks are numbered in turn."""
    packed: list[list[int]] = []
    for one in ids:
        if packed and packed[-1][0] + packed[-1][1] == one:
            packed[-1][1] += 1
        else:
            packed.append([one, 1])
    return packed


def unpacked(packed: Sequence[Sequence[int]]) -> list[int]:
    """The ids of runs. ValueError when they are not pairs of small whole numbers."""
    found: list[int] = []
    for pair in packed:
        start, length = pair
        if type(start) is not int or type(length) is not int or start < 0 or not 0 < length < 10_000_000:
            raise ValueError(f"run {pair!r}")
        if len(found) + length > MOST_BLOCKS_OF_A_PROMPT:
            raise ValueError(f"more than {MOST_BLOCKS_OF_A_PROMPT:,} blocks")
        found.extend(range(start, start + length))
    return found
