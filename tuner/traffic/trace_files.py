"""Finds traces by the digest of their content: in the home, otherwise in the artifact store.

`TUNER_ARTIFACTS` names the store: a folder that several homes mount, or a URL. Arrow opens `s3://` and
`gs://`, and fsspec opens other URLs (`pip install 'vllm-config-tuner[artifacts]'`). The last place is the
path in the history. A file there is used only if its content has the digest.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import BadInput, NotFound, Unavailable
from tuner.settings import Settings
from tuner.traffic import trace as traces
from tuner.traffic.trace import Trace

if TYPE_CHECKING:
    from pyarrow import fs


OWN = ("s3://", "gs://")
"""The URLs that Arrow itself opens."""


def keep(trace: Trace, home: Path, name: str = "trace") -> Path:
    """Stores a trace in a home and in the artifact store; returns its file in the home."""
    own = next((path for path, _ in _own(trace.digest, home)), None)
    if own is None:
        own = home / "traces" / f"{name}-{trace.digest[:12]}.parquet"
        _make(own.parent)
        traces.write(trace, own)
    if artifacts := Settings().artifacts:
        _store(own, trace.digest, artifacts)
    return own


def find(digest: str, hint: str = "") -> tuple[Trace, Path]:
    """A known trace and its file. NotFound names the places if no file has this content."""
    settings = Settings()
    for path, own in _own(digest, settings.home):
        return own, path
    if settings.artifacts and (fetched := _fetched(digest, settings.artifacts)) is not None:
        return fetched
    if hint and (found := _read(Path(hint), digest)) is not None:
        return found, Path(hint)
    places = [str(settings.home / "traces"), *([settings.artifacts] if settings.artifacts else [])]
    raise NotFound(
        f"the file of trace {digest[:12]} is not in {' and not in '.join(places)}. Copy it there, import it"
        " again, or set TUNER_ARTIFACTS to a store that several hosts share"
    )


def near(digest: str, hint: str = "") -> Path | None:
    """A file of this home, or at the hint, that names this digest. Its content is not checked."""
    for path in (*_named(digest, Settings().home), Path(hint)):
        if path.suffix == ".parquet" and os.path.isfile(path):
            with suppress(BadInput):
                if traces.digest_in(path) == digest:
                    return path
    return None


def _named(digest: str, home: Path) -> list[Path]:
    return sorted((home / "traces").glob(f"*{digest[:12]}*.parquet"))


def _own(digest: str, home: Path) -> Iterator[tuple[Path, Trace]]:
    """Files of a home that may hold the content. A file's name is only a hint."""
    for path in _named(digest, home):
        if (found := _read(path, digest)) is not None:
            yield path, found


def _read(path: Path, digest: str) -> Trace | None:
    if path.suffix != ".parquet" or not os.path.isfile(path):
        return None
    try:
        found = traces.read(path)
    except BadInput:
        return None
    return found if found.digest == digest else None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make {folder}: {error.strerror or error}") from error


def _store(file: Path, digest: str, artifacts: str) -> None:
    """Puts a file into the store if it is not there yet. Unavailable if the store cannot be written."""
    files, folder = _filesystem(artifacts)
    target = f"{folder}/{digest}.parquet"
    try:
        if files.get_file_info(target).is_file:
            return
        files.create_dir(folder, recursive=True)
        part = f"{target}.{os.getpid()}.part"
        with file.open("rb") as here, files.open_output_stream(part) as there:
            shutil.copyfileobj(here, there)
        files.move(part, target)
    except Exception as error:  # each kind of store has errors of its own
        raise Unavailable(f"TUNER_ARTIFACTS {artifacts}: the trace cannot be kept: {error}") from error


def _fetched(digest: str, artifacts: str) -> tuple[Trace, Path] | None:
    """A trace of the store, copied into this home; None if the store does not have this content."""
    files, folder = _filesystem(artifacts)
    source, home = f"{folder}/{digest}.parquet", Settings().home / "traces"
    _make(home)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        part = Path(scratch) / "trace.parquet"
        try:
            if not files.get_file_info(source).is_file:
                return None
            with files.open_input_stream(source) as there, part.open("wb") as here:
                shutil.copyfileobj(there, here)
        except Exception as error:  # each kind of store has errors of its own
            raise Unavailable(f"TUNER_ARTIFACTS {artifacts}: the trace cannot be read: {error}") from error
        if (found := _read(part, digest)) is None:
            raise BadInput(f"{source} in TUNER_ARTIFACTS is not the trace {digest[:12]}: delete this file")
        path = home / f"trace-{digest[:12]}.parquet"
        os.replace(part, path)
        return found, path


def _filesystem(artifacts: str) -> "tuple[fs.FileSystem, str]":
    """The file system of the store, and the folder of its traces."""
    from pyarrow import fs

    if "://" not in artifacts:
        return fs.LocalFileSystem(), str(Path(artifacts).expanduser().absolute() / "traces")
    try:
        if artifacts.startswith(OWN):
            found, place = fs.FileSystem.from_uri(artifacts)
            return found, f"{place.rstrip('/')}/traces"
        import fsspec

        files, folder = fsspec.core.url_to_fs(artifacts)
    except (ImportError, OSError, ValueError) as error:
        raise BadInput(
            f"TUNER_ARTIFACTS {artifacts}: cannot be opened: {error};"
            " for URLs other than s3:// and gs://: pip install 'vllm-config-tuner[artifacts]'"
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(files)), f"{str(folder).rstrip('/')}/traces"
