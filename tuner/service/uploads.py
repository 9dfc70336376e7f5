"""Traces that are sent in pieces.

An upload is two files, so it can continue after a restart of the client or of the service. Another process
(traffic/upload_reader.py) reads the finished upload. The service holds only one piece in memory at a time.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tuner.errors import BadInput, Conflict, NotFound, Unavailable
from tuner.traffic import upload_reader
from tuner.traffic.upload_reader import Taken

LARGEST = 2 * 1024**3
LARGEST_PIECE = 8 * 1024**2
LIFE_S = 24 * 3600.0
SPARE = 1024**3
"""Bytes of the disk that uploads must leave free for the history and the logs of runs."""
AT_ONCE, OF_ONE = 32, 8
"""Uploads that may be open: of all tokens, and of one token."""
READ_AT_ONCE = 2
_beginning = threading.Lock()
_readers = threading.BoundedSemaphore(READ_AT_ONCE)
UPLOAD_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An open upload: the name of the trace, its size in bytes and the SHA-256 of its file.

    `unit` (s, ms, us, ns) is the unit of times that the file gives as numbers without a unit. `owner` is the
    token that began the upload.
    """

    id: str
    name: str
    size: int
    sha256: str
    unit: str | None = None
    owner: str = ""
    offset: int = 0


class Uploads:
    """Uploads under TUNER_HOME/uploads; finished traces go to TUNER_HOME/traces."""

    def __init__(self, home: Path) -> None:
        self._folder, self._traces = home / "uploads", home / "traces"

    def begin(self, *, name: str, size: int, sha256: str, unit: str | None = None, owner: str = "") -> Upload:
        """A new upload. First, uploads without a change for a day are deleted."""
        upload = Upload(id=secrets.token_hex(16), name=name, size=size, sha256=sha256, unit=unit, owner=owner)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _beginning:
                self._clear_old()
                self._refuse_more(upload)
                self._part(upload.id).touch(mode=0o600)
                self._card(upload.id).write_text(json.dumps(asdict(upload)), encoding="utf-8")
        except OSError as error:
            raise Unavailable(f"uploads cannot be written: {error.strerror or error}") from error
        return upload

    def _refuse_more(self, asked: Upload) -> None:
        """Raises Conflict if too many uploads are open, or if the disk has no room for them. Each upload
        needs its bytes twice while it is read.
        """
        known = [path.stem for path in self._folder.glob("*.json")]
        if len(known) >= AT_ONCE:
            raise Conflict(f"{AT_ONCE} uploads are under way; finish or abandon one")
        begun: list[Upload] = []
        for upload_id in known:
            with suppress(NotFound, ValueError):  # it has just ended, or was cut off by a crash
                begun.append(self.upload(upload_id))
        if sum(each.owner == asked.owner for each in begun) >= OF_ONE:
            raise Conflict(f"this token has {OF_ONE} uploads under way; finish or abandon one")
        wanted = asked.size * 2 + sum(each.size * 2 - each.offset for each in begun)
        if shutil.disk_usage(self._folder).free < wanted + SPARE:
            raise Conflict(
                f"the service's disk has too little room for {asked.size} bytes: an upload needs twice as"
                " many while it is read, and 1 GiB stays free"
            )

    def _clear_old(self) -> None:
        for path in self._folder.iterdir():
            if time.time() - path.stat().st_mtime > LIFE_S:
                path.unlink(missing_ok=True)

    def _part(self, upload_id: str) -> Path:
        return self._folder / f"{upload_id}.part"

    def _card(self, upload_id: str) -> Path:
        return self._folder / f"{upload_id}.json"

    def upload(self, upload_id: str) -> Upload:
        """An upload with the number of bytes that have arrived."""
        try:
            if not UPLOAD_ID.fullmatch(upload_id):
                raise FileNotFoundError(upload_id)
            kept = json.loads(self._card(upload_id).read_text(encoding="utf-8"))
            return Upload(**{**kept, "offset": self._part(upload_id).stat().st_size})
        except FileNotFoundError:
            raise NotFound(
                f"there is no upload '{upload_id}'; it was finished, or deleted after a day without a change"
            ) from None

    def add(self, upload_id: str, offset: int, piece: IO[bytes]) -> Upload:
        """Appends a piece. Conflict says where the next piece must begin."""
        upload = self.upload(upload_id)
        if offset != upload.offset:
            raise Conflict(f"the next piece begins at {upload.offset}, not {offset}")
        if upload.offset + piece.seek(0, os.SEEK_END) > upload.size:
            raise BadInput(
                f"with this piece the upload has more than the {upload.size} bytes that were announced"
            )
        try:
            with self._part(upload_id).open("r+b") as file:
                file.seek(offset)
                piece.seek(0)
                shutil.copyfileobj(piece, file)
        except OSError as error:
            raise Unavailable(f"the piece cannot be written: {error.strerror or error}") from error
        return self.upload(upload_id)

    def finish(self, upload_id: str) -> tuple[Upload, Taken, Path]:
        """Checks size and digest, and keeps the trace as Parquet. After this the upload is deleted, unless
        bytes are missing.

        Unavailable if too many other uploads are being read.
        """
        upload = self.upload(upload_id)
        if upload.offset != upload.size:
            raise Conflict(f"{upload.offset} of {upload.size} bytes are here; send the rest first")
        if not _readers.acquire(blocking=False):
            raise Unavailable(f"{READ_AT_ONCE} uploads are being read; try again")
        made = self._part(upload_id).with_suffix(".parquet")
        try:
            taken = self._read(upload, made)
            path = self._traces / f"{upload.name}-{taken.digest[:12]}.parquet"
            self._traces.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(made, path)
        except OSError as error:
            raise Unavailable(f"the trace cannot be kept: {error.strerror or error}") from error
        finally:
            _readers.release()
            made.unlink(missing_ok=True)
            self._remove(upload_id)
        return upload, taken, path

    def _read(self, upload: Upload, made: Path) -> Taken:
        """The trace of an upload, written to `made`. The size and the digest of the upload must be right."""
        part = self._part(upload.id)
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != upload.sha256:
            raise BadInput(f"the bytes that arrived have SHA-256 {digest}, not {upload.sha256}")
        return upload_reader.take(part, made, upload.unit)

    def abandon(self, upload_id: str) -> None:
        """Deletes an upload."""
        self.upload(upload_id)
        self._remove(upload_id)

    def _remove(self, upload_id: str) -> None:
        self._card(upload_id).unlink(missing_ok=True)
        self._part(upload_id).unlink(missing_ok=True)
