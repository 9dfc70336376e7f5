"""One replay at a time per host: two would measure each other."""

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tuner.errors import Unavailable
from tuner.settings import Settings

ASK_S = 0.1


@asynccontextmanager
async def held(*, isolated: bool = False) -> AsyncIterator[None]:
    """Hold this host's replay lock, waiting for it. The kernel frees it when its holder dies."""
    if isolated:
        yield
        return
    path = Settings().home / f"replay-{socket.gethostname()}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot open the replay lock {path}: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(ASK_S)
        yield
    finally:
        os.close(descriptor)
