"""Profile versions, aliases and their events. The rules of promotion are in `tuner.profiles`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, and_, func, insert, select, update

from tuner.errors import BadInput, Conflict, NotFound
from tuner.history.base import StorePart, equal, first_of, record_of, row_of
from tuner.history.tables import alias_events, aliases, profiles
from tuner.records import JSON, AliasEvent, Candidate, Profile, ProfileKey, digest_of


def _at(table: Table, key: ProfileKey | None) -> ColumnElement[bool]:
    """Of this key; None: of any."""
    parts = row_of(key) if key is not None else {}
    return and_(True, *(table.c[name] == value for name, value in parts.items()))


def _words(key: ProfileKey) -> str:
    return f"{key.model} on {key.target} for {key.workload}"


def _alias(connection: Connection, key: ProfileKey, alias: str) -> RowMapping | None:
    query = select(aliases).where(_at(aliases, key), aliases.c.alias == alias)
    return connection.execute(query).mappings().one_or_none()


class ProfileStore(StorePart):
    """Versions are never changed; an alias moves by compare-and-set, and each move is an event."""

    def add_profile(
        self,
        *,
        key: ProfileKey,
        candidate: Candidate,
        engine_version: str,
        gpu_class: str,
        study_id: str,
        trial_id: int | None,
        argv: Sequence[str],
        env: Mapping[str, str],
        evidence: Mapping[str, JSON],
        now: datetime,
    ) -> Profile:
        """Writes the next version of a key. The newest version's content again gives that version back."""
        content: dict[str, Any] = {
            "candidate": dict(candidate),
            "engine_version": engine_version,
            "gpu_class": gpu_class,
            "study_id": study_id,
            "trial_id": trial_id,
            "argv": list(argv),
            "env": dict(env),
            "evidence": dict(evidence),
            **row_of(key),
        }
        try:
            digest = digest_of(content)
        except (TypeError, ValueError) as error:
            raise BadInput(f"a profile's evidence must be JSON without NaN or infinity: {error}") from error

        def work(connection: Connection) -> Profile:
            newest = select(profiles).where(_at(profiles, key)).order_by(profiles.c.version.desc()).limit(1)
            before = first_of(Profile, connection, newest)
            if before is not None and before.digest == digest:
                return before
            version = 1 if before is None else before.version + 1
            values = {**content, "version": version, "digest": digest, "created_at": now}
            connection.execute(insert(profiles).values(**values))
            return record_of(Profile, connection.execute(newest).mappings().one())

        return self._write(work)

    def profile(self, profile_id: int) -> Profile:
        found = self._records(Profile, select(profiles).where(profiles.c.id == profile_id))
        if not found:
            raise NotFound(f"there is no profile with id {profile_id} (`tuner profile list` shows the ids)")
        return found[0]

    def profile_version(self, key: ProfileKey, version: int) -> Profile:
        def work(connection: Connection) -> Profile:
            query = select(profiles).where(_at(profiles, key), profiles.c.version == version)
            found = first_of(Profile, connection, query)
            if found is None:
                newest = connection.execute(select(func.max(profiles.c.version)).where(_at(profiles, key)))
                known = newest.scalar()
                there = f"the newest is {known}" if known else "there is none at all"
                raise NotFound(f"there is no version {version} of the profile {_words(key)}: {there}")
            return found

        return self._read(work)

    def profiles(
        self,
        key: ProfileKey | None = None,
        *,
        model: str | None = None,
        after: int | None = None,
        limit: int | None = None,
    ) -> tuple[Profile, ...]:
        """Profile versions, the newest first; `after` is the id of the last one of the page before."""
        query = select(profiles).where(_at(profiles, key), *equal((profiles.c.model, model)))
        if after is not None:
            query = query.where(profiles.c.id < after)
        return self._records(Profile, query.order_by(profiles.c.id.desc()).limit(limit))

    def profile_keys(self, model: str | None = None) -> tuple[ProfileKey, ...]:
        """The keys that have versions, in order."""
        return self._keys((profiles.c.model, profiles.c.target, profiles.c.workload), model)

    def move_alias(
        self,
        key: ProfileKey,
        alias: str,
        to_version: int | None,
        *,
        expected: int | None,
        actor: str,
        reason: str,
        now: datetime,
    ) -> AliasEvent:
        """Moves an alias (to None: takes it away) and writes the event.

        `expected` is the generation that the mover saw, 0 for an alias that was never set, None for
        whatever it is. Raises Conflict when it is another one by now, or the alias is frozen.
        """

        def work(connection: Connection) -> AliasEvent:
            row = _alias(connection, key, alias)
            generation = 0 if row is None else row["generation"]
            if expected is not None and expected != generation:
                raise Conflict(
                    f"alias '{alias}' of {_words(key)} is at generation {generation}, not {expected}:"
                    " somebody has moved it"
                )
            if row is not None and row["frozen"]:
                raise Conflict(f"alias '{alias}' of {_words(key)} is frozen: unfreeze it first (docs/api.md)")
            if to_version is not None:
                there = select(profiles.c.id).where(_at(profiles, key), profiles.c.version == to_version)
                if connection.execute(there).first() is None:
                    raise NotFound(f"there is no version {to_version} of the profile {_words(key)}")
            return _record(
                connection, key, alias, row, to_version, frozen=False, actor=actor, reason=reason, now=now
            )

        return self._write(work)

    def freeze_alias(
        self, key: ProfileKey, alias: str, frozen: bool, *, actor: str, reason: str, now: datetime
    ) -> AliasEvent:
        """Forbids an alias to move, or allows it again; the event has the same version on both sides."""

        def work(connection: Connection) -> AliasEvent:
            row = _alias(connection, key, alias)
            if row is None:
                raise NotFound(f"{_words(key)} has no alias '{alias}'")
            words = f"{'frozen' if frozen else 'unfrozen'}: {reason}"
            version: int | None = row["version"]
            return _record(
                connection, key, alias, row, version, frozen=frozen, actor=actor, reason=words, now=now
            )

        return self._write(work)

    def alias(self, key: ProfileKey, alias: str) -> AliasEvent | None:
        """The newest event of an alias, None when it was never set. `to_version` None: it was removed."""
        query = select(alias_events).where(_at(alias_events, key), alias_events.c.alias == alias)
        found = self._records(AliasEvent, query.order_by(alias_events.c.generation.desc()).limit(1))
        return found[0] if found else None

    def alias_frozen(self, key: ProfileKey, alias: str) -> bool:
        """Whether an alias is forbidden to move."""
        row = self._read(lambda connection: _alias(connection, key, alias))
        return row is not None and bool(row["frozen"])

    def aliases(self, key: ProfileKey | None = None) -> tuple[AliasEvent, ...]:
        """The newest event of every alias that is set, by key and alias."""
        parts = ("model", "target", "workload", "alias")
        same = and_(*(aliases.c[name] == alias_events.c[name] for name in (*parts, "generation")))
        query = select(alias_events).select_from(aliases.join(alias_events, same))
        query = query.where(aliases.c.version.is_not(None), _at(aliases, key))
        return self._records(AliasEvent, query.order_by(*(alias_events.c[name] for name in parts)))

    def alias_events(
        self, key: ProfileKey | None = None, *, alias: str | None = None
    ) -> tuple[AliasEvent, ...]:
        """Every move, the oldest first."""
        query = select(alias_events).where(_at(alias_events, key), *equal((alias_events.c.alias, alias)))
        return self._records(AliasEvent, query.order_by(alias_events.c.id))


def _record(
    connection: Connection,
    key: ProfileKey,
    alias: str,
    row: RowMapping | None,
    to_version: int | None,
    *,
    frozen: bool,
    actor: str,
    reason: str,
    now: datetime,
) -> AliasEvent:
    """Writes the new version of an alias, and the event that records the change, which is no earlier than the
    alias's last one: a virtual clock may have been ahead.
    """
    last = select(func.max(alias_events.c.at)).where(_at(alias_events, key), alias_events.c.alias == alias)
    before = connection.execute(last).scalar()
    generation = 1 if row is None else int(row["generation"]) + 1
    state = {"generation": generation, "version": to_version, "frozen": frozen}
    if row is None:
        connection.execute(insert(aliases).values(alias=alias, **row_of(key), **state))
    else:
        connection.execute(update(aliases).where(_at(aliases, key), aliases.c.alias == alias).values(**state))
    event = AliasEvent(
        key=key,
        alias=alias,
        generation=generation,
        from_version=None if row is None else row["version"],
        to_version=to_version,
        actor=actor,
        reason=reason,
        at=now if before is None else max(now, before),
    )
    connection.execute(insert(alias_events).values(**row_of(event)))
    return event
