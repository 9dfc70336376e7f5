"""Reads foreign files line by line. An error about a wrong value names its file, line and key."""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, cast

from tuner.errors import BadInput, nearest
from tuner.measures import many
from tuner.traffic.importers.stamps import LIMIT_NS, UNITS_NS, date_unit, parse_stamp

# The most bytes of a line, of a row of CSV (which may go over lines), and of a JSON document that is one
# object: what a trace needs is far smaller, and a hostile upload must not fill the memory.
LONGEST_LINE = 32 * 1024**2
LONGEST_CSV_ROW = 1024**2
LARGEST_DOCUMENT = 64 * 1024**2
_PIECE = 64 * 1024  # bytes of a JSON list that are read at a time
_SPACES = frozenset(" \t\r\n")

# A gzip file is refused if it expands beyond so many bytes and so many times.
_UNPACKED, _RATIO = 64 * 1024**2, 200
_WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Record:
    """The values of one line by key, and its place in the file. The methods raise BadInput, which names the
    place.
    """

    path: Path
    line: int
    data: Mapping[str, Any]

    def bad(self, key: str, problem: str) -> BadInput:
        """The error to raise for a key of this record."""
        return BadInput(f"{self.path}: line {self.line}: '{key}' {problem}")

    def has(self, key: str) -> bool:
        """Whether the key has a value (not absent, null or an empty cell)."""
        return self.data.get(key) not in (None, "")

    def first(self, *keys: str) -> str:
        """The first of these keys that has a value; BadInput if none has."""
        for key in keys:
            if self.has(key):
                return key
        if empty := next((key for key in keys if key in self.data), None):
            is_cell = isinstance(self.data[empty], str)  # as each value of a CSV file is
            raise self.bad(empty, "is empty: the cell holds nothing" if is_cell else "is null")
        raise self.bad(keys[0], "is missing" + nearest(keys[0], map(str, self.data)))

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.data.get(self.first(key))
        try:
            number = float(cast(Any, value)) if not isinstance(value, bool) else float("nan")
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not isfinite(number):
            raise self.bad(key, f"is {_shown(value)}, expected a number")
        return number

    def whole(self, key: str) -> int:
        """A whole number of 32 bits; it may be negative."""
        value = self.data.get(self.first(key))
        if type(value) is int:
            number = value
        elif isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
            number = int(value.strip())
        else:
            as_float = self.number(key)
            if as_float != int(as_float):
                raise self.bad(key, f"is {_shown(value)}, expected a whole number")
            number = int(as_float)
        if not -(2**31) < number < 2**31:
            raise self.bad(key, f"is {_shown(value)}, expected a number of tokens below 2147483648")
        return number

    def nanoseconds(self, key: str, unit_ns: int) -> int:
        """A number in a unit as whole nanoseconds (exact for whole numbers)."""
        value = self.data.get(self.first(key))
        if type(value) is int:
            result = value * unit_ns
        elif isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
            result = int(value.strip()) * unit_ns
        else:
            scaled = self.number(key) * unit_ns
            result = round(scaled) if isfinite(scaled) else LIMIT_NS
        return self.within(key, result)

    def plain_number(self, key: str) -> int | float:
        """A finite number; whole numbers are exact."""
        value = self.data.get(self.first(key))
        if type(value) is int:
            return value if abs(value) < LIMIT_NS else self.within(key, value)
        if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
            return int(value.strip())
        return self.number(key)

    def moment(self, key: str, unit: str | None = None) -> int:
        """Nanoseconds of ISO 8601 (UTC if it has no zone), or of a number in `unit` (s, ms, us, ns).

        Without `unit`, the number must be a date between 2010 and 2040 in one of these units, counted since
        1970.
        """
        value = self.data.get(self.first(key))
        if isinstance(value, str):
            found = parse_stamp(value)
            if found is not None:
                return self.within(key, found)
        number = self.number(key)
        if unit is None:
            unit = date_unit(number, number)
        if unit is None:
            raise self.bad(
                key,
                f"is {_shown(value)}, which is not a date (ISO 8601). If it is a number since 1970, give its "
                f"unit with --unit s, ms, us or ns",
            )
        return self.nanoseconds(key, UNITS_NS[unit])

    def within(self, key: str, stamp_ns: int) -> int:
        """The time stamp itself if it fits into 64 bits."""
        if not -LIMIT_NS < stamp_ns < LIMIT_NS:
            raise self.bad(key, f"is {_shown(self.data.get(key))}, beyond the times that a trace can store")
        return stamp_ns

    def given(self, read: Callable[[str], Any], keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Name → the result of `read` on the first of its keys that has a value. Names whose keys have no
        value are left out.
        """
        first = {name: next(filter(self.has, each), None) for name, each in keys.items()}
        return {name: read(key) for name, key in first.items() if key is not None}

    def text(self, key: str) -> str:
        """The value as text."""
        return str(self.data[key])

    def child(self, key: str) -> "Record | None":
        """The object under a key as a record of the same line; None if it is absent, BadInput if it is not an
        object.
        """
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value[:1] == "{":
            value = _loads(value, self.path, self.line)
        if not isinstance(value, dict):
            raise self.bad(key, f"is {_shown(value)}, expected an object")
        return Record(self.path, self.line, value)

    def items(self, key: str) -> list[Any]:
        """The list under a key; [] if it is absent."""
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.bad(key, f"is {_shown(value)}, expected a list")
        return value

    def block_ids(self, key: str) -> list[int | str]:
        """The list of block ids under a key: whole numbers or texts. [] if it is absent."""
        ids = self.items(key)
        for one in ids:
            if type(one) is not int and type(one) is not str:
                raise self.bad(key, f"holds {one!r}, expected whole numbers")
        return ids


def open_bytes(path: Path) -> BinaryIO:
    """The file opened for reading, unpacked when it is gzip. BadInput when it cannot be opened."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error


def head(path: Path, size: int = 65536) -> bytes:
    """The first bytes of the (unpacked) file."""
    try:
        with open_bytes(path) as file:
            return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be unpacked: {error}") from error


def lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(number from 1, text without its line end, whether there was a line end) of each line, as UTF-8.

    BadInput if a line has more than LONGEST_LINE bytes, or if a gzip file unpacks to far too much.
    """
    number = 0
    try:
        for raw in _pieces(path, lambda file: file.readline(LONGEST_LINE + 1)):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise BadInput(f"{path}: line {number}: longer than {LONGEST_LINE:,} bytes")
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            yield number, text.rstrip("\r\n"), raw.endswith(b"\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: line {number}: not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: line {number + 1}: reading failed here: {error}") from error


def _pieces(path: Path, read: Callable[[BinaryIO], bytes]) -> Iterator[bytes]:
    """The results of `read` on the (unpacked) file, one after another. BadInput if too much is unpacked."""
    most, unpacked = max(_UNPACKED, _RATIO * path.stat().st_size), 0
    with open_bytes(path) as file:
        while piece := read(file):
            unpacked += len(piece)
            if unpacked > most:
                raise BadInput(f"{path}: cannot be unpacked: it grows to more than {_RATIO} times its size")
            yield piece


def json_lines(path: Path, quality: "Counter[str]") -> Iterator[Record]:
    """The objects of a JSONL file, or of a file that is one JSON list.

    If the last line was cut off, it is dropped and counted. Any other line that is not JSON is a BadInput.
    """
    if head(path, 4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        yield from _json_list(path)
        return
    for number, text, ended in lines(path):
        if not text.strip():
            continue
        try:
            data = _loads(text, path, number)
        except BadInput:
            if ended or number == 1:
                raise
            quality["cut_last_line"] += 1
            return
        if not isinstance(data, dict):
            raise BadInput(f"{path}: line {number}: a JSON object is expected, not {type(data).__name__}")
        yield Record(path, number, data)


def records(path: Path, quality: "Counter[str]") -> Iterator[Record]:
    """The objects of a JSON file or the rows of a CSV file, whichever it is."""
    is_json = head(path, 4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
    return json_lines(path, quality) if is_json else csv_records(path, quality)


def whole_json(path: Path) -> Any:
    """A file that is one JSON document. BadInput beyond LARGEST_DOCUMENT bytes."""
    text, size = io.StringIO(), 0  # a list of short lines would take nine times the memory
    for number, line, _ in lines(path):
        text.write(line if number == 1 else f"\n{line}")
        size += len(line) + 1
        if size > LARGEST_DOCUMENT:
            raise BadInput(f"{path}: one JSON document of more than {LARGEST_DOCUMENT:,} bytes; write JSONL")
    return _loads(text.getvalue(), path, None)


def csv_records(path: Path, quality: "Counter[str]") -> Iterator[Record]:
    """The rows of a CSV file with a header. If the last row was cut off, it is dropped and counted."""
    cut, size = False, 0

    def texts() -> Iterator[str]:
        nonlocal cut, size
        for number, text, ended in lines(path):
            cut, size = not ended, size + len(text) + 1
            if size > LONGEST_CSV_ROW:
                raise BadInput(f"{path}: line {number}: a row longer than {LONGEST_CSV_ROW:,} characters")
            yield text + "\n"

    reader = csv.reader(texts(), strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if len(set(header)) != len(header):
            raise BadInput(f"{path}: line 1: a column name occurs twice in the header")
        for cells in reader:
            size = 0
            if not cells:
                continue
            if len(cells) != len(header):
                if cut and len(cells) < len(header):
                    quality["cut_last_line"] += 1
                    return
                found = f"{many(len(cells), 'cell')}, but the header has {len(header)}"
                raise BadInput(f"{path}: line {reader.line_num}: {found}")
            yield Record(path, reader.line_num, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise BadInput(f"{path}: line {reader.line_num}: not CSV: {error}") from error


def _json_list(path: Path) -> Iterator[Record]:
    """The objects of a file that is one JSON list, one at a time."""
    text = _Ahead(path)
    text.skip("[")
    number = 0
    while not text.skip("]"):
        number += 1
        item = text.value(number)
        if not isinstance(item, dict):
            raise BadInput(f"{path}: item {number}: an object is expected, not {type(item).__name__}")
        yield Record(path, number, item)
        if not text.skip(",") and not text.at("]"):
            raise BadInput(f"{path}: item {number}: not JSON: expected ',' or ']' after it")
    if text.left():
        raise BadInput(f"{path}: not JSON: there is something after the list")


class _Ahead:
    """Text of a file, read only as far as the next value needs it."""

    def __init__(self, path: Path) -> None:
        self._path, self._pieces = path, _pieces(path, lambda file: file.read(_PIECE))
        self._decoder, self._unicode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0

    def at(self, mark: str) -> bool:
        """Whether the next character that is no space is this one."""
        while True:
            while self._text[self._at : self._at + 1] in _SPACES:
                self._at += 1
            if self._at < len(self._text) or not self._more(1):
                return self._text.startswith(mark, self._at)

    def skip(self, mark: str) -> bool:
        """As `at`, and if so, moves past it."""
        found = self.at(mark)
        self._at += len(mark) * found
        return found

    def left(self) -> bool:
        """Whether there is anything but space left."""
        return self.at("") and self._at < len(self._text)

    def value(self, number: int) -> Any:
        """The value that begins here. Each attempt reads twice as much as the one before."""
        self.at("")
        while True:
            try:
                found, self._at = self._decoder.raw_decode(self._text, self._at)
                return found
            except (ValueError, RecursionError) as error:
                long = len(self._text) - self._at > LONGEST_LINE or isinstance(error, RecursionError)
                if long or not self._more(len(self._text) - self._at + 1):
                    raise BadInput(f"{self._path}: item {number}: not JSON: {error}") from error

    def _more(self, size: int) -> bool:
        """Reads about `size` more characters; False at the end of the file."""
        self._text, self._at = self._text[self._at :], 0
        pieces = [self._text]
        try:
            while size > 0 and (piece := next(self._pieces, None)) is not None:
                pieces.append(self._unicode.decode(piece))
                size -= len(piece)
        except UnicodeDecodeError as error:
            raise BadInput(f"{self._path}: not UTF-8 text: {error.reason}") from error
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(f"{self._path}: reading failed: {error}") from error
        self._text = "".join(pieces)
        return len(pieces) > 1


def _loads(text: str, path: Path, number: int | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f"{path}: line {number}" if number is not None else f"{path}"
        raise BadInput(f"{place}: not JSON: {error}") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
