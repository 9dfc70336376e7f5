"""Sessions of the pages, and how often an address may try a token. A restart of the service forgets both."""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv6Address, ip_address
from threading import Lock

LIFE, IDLE = timedelta(hours=12), timedelta(hours=2)
"""How long a session lasts, and how long unused."""
MOST_SESSIONS, MOST_ADDRESSES = 4096, 10_000


@dataclass(slots=True)
class _Session:
    token: str
    began: datetime
    used: datetime

    def over(self, now: datetime) -> bool:
        return now - self.began >= LIFE or now - self.used >= IDLE


class Sessions:
    """Opaque words that stand for tokens. Words are kept as hashes, tokens in memory only."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock, self._lock = clock, Lock()
        self._kept: dict[bytes, _Session] = {}

    def begin(self, token: str) -> str:
        """A new session's word. The oldest session ends where there are too many."""
        word, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            self._kept = {key: each for key, each in self._kept.items() if not each.over(now)}
            while len(self._kept) >= MOST_SESSIONS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[_key(word)] = _Session(token, now, now)
        return word

    def token(self, word: str) -> str | None:
        """The token of a session that lasts; its use is noted."""
        key, now = _key(word), self._clock()
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.over(now):
                self._kept.pop(key, None)
                return None
            found.used = now
            return found.token

    def end(self, word: str) -> None:
        """Ends a session at once, whoever kept its word."""
        with self._lock:
            self._kept.pop(_key(word), None)


class Attempts:
    """Counts failures by client address: at most `most` within `span`."""

    def __init__(self, clock: Callable[[], datetime], *, most: int, span: timedelta) -> None:
        self._clock, self._most, self._span, self._lock = clock, most, span, Lock()
        self._failed: dict[str, list[datetime]] = {}

    def wait_s(self, client: str) -> int:
        """Seconds until this address may try again; 0: now."""
        now = self._clock()
        with self._lock:
            failed = [at for at in self._failed.get(_network(client), []) if now - at < self._span]
        if len(failed) < self._most:
            return 0
        return max(1, round((failed[-self._most] + self._span - now).total_seconds()))

    def failed(self, client: str) -> None:
        """Notes a failure; the address that failed first is forgotten where there are too many."""
        network = _network(client)
        with self._lock:
            before = self._failed.pop(network, [])
            while len(self._failed) >= MOST_ADDRESSES:
                self._failed.pop(next(iter(self._failed)))
            self._failed[network] = [*before, self._clock()][-self._most :]


def _key(word: str) -> bytes:
    return hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()


def _network(client: str) -> str:
    """The address; of IPv6 the 64 bits that one host can choose its addresses in."""
    try:
        address = ip_address(client)
    except ValueError:
        return client
    return str(int(address) >> 64) if isinstance(address, IPv6Address) else client
