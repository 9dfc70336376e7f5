"""The Store: everything that is remembered, over SQLite or PostgreSQL."""

import socket
from collections.abc import Callable
from datetime import datetime

from tuner.errors import NotFound
from tuner.history.database import Database
from tuner.history.entities import Lease
from tuner.history.maintenance import upgrade
from tuner.history.profiles import ProfileStore
from tuner.history.run_best import BestStore
from tuner.history.service import AccessStore, NodeStore
from tuner.history.studies import StudyStore
from tuner.history.trials import TrialStore
from tuner.leftovers import lives
from tuner.records import Run, RunState


class Store(StudyStore, TrialStore, BestStore, ProfileStore, NodeStore, AccessStore):
    """Opens a database by URL (`sqlite:///path`, `postgresql://user@host/name`); safe to use from threads.

    An empty database is made with `create`, else NotFound. One of an older release raises Conflict (run
    `upgrade`), one of a newer release too. Unavailable when it is locked, full or away for `patience_s`.
    """

    def __init__(self, url: str, *, create: bool = True, patience_s: float = 15.0, check: bool = True):
        self._database = Database(url, patience_s=patience_s)
        path = self._database.path
        if path is not None and not create and not path.exists():
            raise NotFound(
                f"there is no database {path}: 'tuner tune', 'tuner trace import' or 'tuner db upgrade' makes"
                " it"
            )
        if path is not None:
            self._database.make_folder()
        if check:
            if create and self._database.revision() is None:
                self.upgrade()
            self._database.check()

    @property
    def database(self) -> Database:
        return self._database

    def upgrade(self) -> tuple[str | None, str]:
        """Brings the database to this release's revision. Returns the revision before and after."""
        return upgrade(self._database)

    def change_token(self) -> int:
        """A number that changes once another connection has written; the same number: nothing has changed."""
        return self._database.change_token()

    def stopped_runs(self, *, now: datetime) -> frozenset[str]:
        """The ids of the runs that have no end and lost their process, as far as this host can know: from
        their process if it is on this host, and from their node's lease if it is on another host.
        """
        here = socket.gethostname()
        left = [r for r in self.runs(state=RunState.RUNNING) if r.host and not r.cancel_requested]
        leased = {lease.node for lease in self.leases(now=now)} if left else ()

        def lost(run: Run) -> bool:
            if run.host == here:
                return run.pid is None or not lives(run.pid)
            return self.study(run.study_id).node not in leased

        return frozenset(run.id for run in left if lost(run))

    def close(self) -> None:
        self._database.close()

    def fenced(self, lease: Lease, clock: Callable[[], datetime]) -> "Store":
        """The same store, whose every write first proves the lease, in the write's own transaction.

        A write raises Conflict, and changes nothing, once the lease was taken over or ran out by `clock`.
        """
        store = Store.__new__(Store)
        store._database = self._database
        store._lease = lease
        store._clock = clock
        return store
