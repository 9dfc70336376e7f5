"""Boards of studies, read again only when the history has changed."""

from threading import Lock
from weakref import WeakKeyDictionary

from tuner.history.store import Store
from tuner.records import Study
from tuner.report.board import Board, board

KEPT = 8
_boards: WeakKeyDictionary[Store, dict[str, tuple[int, Board]]] = WeakKeyDictionary()
_lock = Lock()


def board_of(store: Store, study: Study) -> tuple[Board, int]:
    """The board of a study and the pulse of the history that it was read at."""
    pulse = store.change_token()
    with _lock:
        kept = _boards.setdefault(store, {})
        if study.id in kept and kept[study.id][0] == pulse:
            return kept[study.id][1], pulse
    found = board(study, store.trials(study.id), store.conclusions(study.id))
    with _lock:
        kept.pop(study.id, None)
        kept[study.id] = (pulse, found)
        while len(kept) > KEPT:
            kept.pop(next(iter(kept)))
    return found, pulse
