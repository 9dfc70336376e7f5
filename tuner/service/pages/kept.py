"""What pages read again and again is made once for each state of the history."""

from collections.abc import Callable
from threading import Lock
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from tuner.history.store import Store

T = TypeVar("T")
MOST = 16
_found: WeakKeyDictionary[Store, dict[str, tuple[int, object]]] = WeakKeyDictionary()
_lock = Lock()


def kept(store: Store, name: str, make: Callable[[], T]) -> tuple[T, int]:
    """(what `make` gives, the state of the history that it was made from); made again when that changed."""
    pulse = store.change_token()
    with _lock:
        ours = _found.setdefault(store, {})
        known = ours.get(name)
    if known is not None and known[0] == pulse:
        return cast(T, known[1]), pulse
    found = make()
    with _lock:
        ours.pop(name, None)
        ours[name] = (pulse, found)
        while len(ours) > MOST:
            ours.pop(next(iter(ours)))
    return found, pulse
