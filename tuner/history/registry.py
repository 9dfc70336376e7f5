"""Profile versions, aliases and the events that moved them. The rules of promotion are in `profiles/`."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, and_, func, insert, select, update

from tuner.errors import BadInput, Conflict, NotFound
from tuner.history.base import Part
from tuner.history.codec import event_of, key_row, profile_of
from tuner.history.tables import alias_events, aliases, profiles
from tuner.records import JSON, AliasEvent, Candidate, Profile, ProfileKey, digest_of


def _at(table: Table, key: ProfileKey) -> ColumnElement[bool]:
    return and_(table.c.model == key.model, table.c.target == key.target, table.c.workload == key.workload)


def _words(key: ProfileKey) -> str:
    return f"{key.model} on {key.target} for {key.workload}"


def _alias(connection: Connection, key: ProfileKey, alias: str) -> RowMapping | None:
    query = select(aliases).where(_at(aliases, key), aliases.c.alias == alias)
    return connection.execute(query).mappings().one_or_none()


class Registry(Part):
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
        content: dict[str, JSON] = {
            "candidate": dict(candidate),
            "engine_version": engine_version,
            "gpu_class": gpu_class,
            "study_id": study_id,
            "trial_id": trial_id,
            "argv": list(argv),
            "env": dict(env),
            "evidence": dict(evidence),
        }
        try:
            digest = digest_of({**content, **key_row(key)})
        except (TypeError, ValueError) as error:
            raise BadInput(f"a profile's evidence must be JSON without NaN or infinity: {error}") from error

        def work(connection: Connection) -> Profile:
            newest = select(profiles).where(_at(profiles, key)).order_by(profiles.c.version.desc()).limit(1)
            row = connection.execute(newest).mappings().one_or_none()
            if row is not None and row["digest"] == digest:
                return profile_of(row)
            version = 1 if row is None else int(row["version"]) + 1
            values = {**content, **key_row(key), "version": version, "digest": digest, "created_at": now}
            connection.execute(insert(profiles).values(**values))
            return profile_of(connection.execute(newest).mappings().one())

        return self._write(work)

    def profile(self, profile_id: int) -> Profile:
        def work(connection: Connection) -> Profile:
            query = select(profiles).where(profiles.c.id == profile_id)
            row = connection.execute(query).mappings().one_or_none()
            if row is None:
                raise NotFound(f"there is no profile with id {profile_id}")
            return profile_of(row)

        return self._read(work)

    def profile_version(self, key: ProfileKey, version: int) -> Profile:
        def work(connection: Connection) -> Profile:
            query = select(profiles).where(_at(profiles, key), profiles.c.version == version)
            row = connection.execute(query).mappings().one_or_none()
            if row is None:
                newest = connection.execute(select(func.max(profiles.c.version)).where(_at(profiles, key)))
                known = newest.scalar()
                there = f"the newest is {known}" if known else "there is none at all"
                raise NotFound(f"there is no version {version} of the profile {_words(key)}: {there}")
            return profile_of(row)

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
        query = select(profiles).order_by(profiles.c.id.desc())
        if key is not None:
            query = query.where(_at(profiles, key))
        if model is not None:
            query = query.where(profiles.c.model == model)
        if after is not None:
            query = query.where(profiles.c.id < after)
        if limit is not None:
            query = query.limit(limit)
        return self._read(lambda c: tuple(profile_of(row) for row in c.execute(query).mappings()))

    def profile_keys(self, model: str | None = None) -> tuple[ProfileKey, ...]:
        """The keys that have versions, in order."""
        parts = (profiles.c.model, profiles.c.target, profiles.c.workload)
        query = select(*parts).distinct().order_by(*parts)
        if model is not None:
            query = query.where(profiles.c.model == model)

        def work(connection: Connection) -> tuple[ProfileKey, ...]:
            rows = connection.execute(query)
            return tuple(ProfileKey(model=m, target=t, workload=w) for m, t, w in rows)

        return self._read(work)

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
            row = self._movable(connection, key, alias, expected)
            if row is not None and row["frozen"]:
                raise Conflict(f"alias '{alias}' of {_words(key)} is frozen: unfreeze it first")
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
        """Forbids an alias to move, or allows it again; an event that goes nowhere tells so."""

        def work(connection: Connection) -> AliasEvent:
            row = self._movable(connection, key, alias, None)
            if row is None:
                raise NotFound(f"{_words(key)} has no alias '{alias}'")
            words = f"{'frozen' if frozen else 'unfrozen'}: {reason}"
            version: int | None = row["version"]
            return _record(
                connection, key, alias, row, version, frozen=frozen, actor=actor, reason=words, now=now
            )

        return self._write(work)

    def _movable(
        self, connection: Connection, key: ProfileKey, alias: str, expected: int | None
    ) -> RowMapping | None:
        row = _alias(connection, key, alias)
        generation = 0 if row is None else row["generation"]
        if expected is not None and expected != generation:
            raise Conflict(
                f"alias '{alias}' of {_words(key)} is at generation {generation}, not {expected}:"
                " somebody moved it in between"
            )
        return row

    def alias(self, key: ProfileKey, alias: str) -> AliasEvent | None:
        """The newest event of an alias, None when it was never set. `to_version` None: it was taken away."""
        query = (
            select(alias_events)
            .where(_at(alias_events, key), alias_events.c.alias == alias)
            .order_by(alias_events.c.generation.desc())
            .limit(1)
        )

        def work(connection: Connection) -> AliasEvent | None:
            row = connection.execute(query).mappings().one_or_none()
            return None if row is None else event_of(row)

        return self._read(work)

    def alias_frozen(self, key: ProfileKey, alias: str) -> bool:
        """Whether an alias is forbidden to move."""

        def work(connection: Connection) -> bool:
            row = _alias(connection, key, alias)
            return row is not None and bool(row["frozen"])

        return self._read(work)

    def aliases(self, key: ProfileKey | None = None) -> tuple[AliasEvent, ...]:
        """The newest event of every alias that is set, by key and alias."""
        newest = aliases.join(
            alias_events,
            and_(
                *(aliases.c[name] == alias_events.c[name] for name in ("model", "target", "workload")),
                aliases.c.alias == alias_events.c.alias,
                aliases.c.generation == alias_events.c.generation,
            ),
        )
        query = select(alias_events).select_from(newest).where(aliases.c.version.is_not(None))
        parts = (alias_events.c.model, alias_events.c.target, alias_events.c.workload, alias_events.c.alias)
        query = query.order_by(*parts)
        if key is not None:
            query = query.where(_at(aliases, key))
        return self._read(lambda c: tuple(event_of(row) for row in c.execute(query).mappings()))

    def alias_events(
        self, key: ProfileKey | None = None, *, alias: str | None = None
    ) -> tuple[AliasEvent, ...]:
        """Every move, the oldest first."""
        query = select(alias_events).order_by(alias_events.c.id)
        if key is not None:
            query = query.where(_at(alias_events, key))
        if alias is not None:
            query = query.where(alias_events.c.alias == alias)
        return self._read(lambda c: tuple(event_of(row) for row in c.execute(query).mappings()))


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
    generation = 1 if row is None else int(row["generation"]) + 1
    state = {"generation": generation, "version": to_version, "frozen": frozen}
    if row is None:
        connection.execute(insert(aliases).values(alias=alias, **key_row(key), **state))
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
        at=now,
    )
    plain = {name: getattr(event, name) for name in AliasEvent.__dataclass_fields__ if name != "key"}
    connection.execute(insert(alias_events).values(**key_row(key), **plain))
    return event
