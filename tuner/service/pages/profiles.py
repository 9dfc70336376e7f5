"""Profiles: versions and aliases, what differs between two, and moving an alias with a reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import ndiff

from tuner.errors import BadInput
from tuner.history.best_per_night import Change
from tuner.history.store import Store
from tuner.profiles import registry
from tuner.records import AliasEvent, Profile, ProfileKey
from tuner.report.card import AnswerCard
from tuner.service.pages.overview import card_of_profile, version_of
from tuner.service.pages.session import Visitor, reason_of

SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """The versions of one key, the newest first, with their aliases. `more`: there are older versions."""

    key: ProfileKey
    versions: Sequence[tuple[Profile, Sequence[str]]]
    more: bool


def shelves(store: Store, named: ProfileKey | None = None) -> list[Shelf]:
    """Every key with its newest versions and all versions with an alias; all versions of the key that was
    chosen.
    """
    aliases: dict[ProfileKey, dict[int, list[str]]] = {}
    for event in store.aliases(named):
        if event.to_version is not None:
            aliases.setdefault(event.key, {}).setdefault(event.to_version, []).append(event.alias)
    found = []
    for key in [named] if named else store.profile_keys():
        names = aliases.get(key, {})
        versions = list(store.profiles(key, limit=None if named else SHOWN + 1))
        more = not named and len(versions) > SHOWN
        versions = versions[:SHOWN] if more else versions
        older = set(names) - {each.version for each in versions}
        versions += [store.profile_version(key, version) for version in sorted(older, reverse=True)]
        found.append(
            Shelf(key=key, versions=[(v, sorted(names.get(v.version, ()))) for v in versions], more=more)
        )
    return [shelf for shelf in found if shelf.versions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One version in full. `card` is the answer of the run that published it. `failed` are the gates that
    forbid its promotion. `generation` is the alias's generation that the visitor saw. `first` is an earlier
    version with the same configuration.
    """

    profile: Profile
    aliases: Sequence[str]
    events: Sequence[AliasEvent]
    champion: Profile | None
    changes: Sequence[Change]
    card: AnswerCard | None
    failed: Sequence[str]
    generation: int
    frozen: bool
    before: int | None
    first: int | None


def sheet(store: Store, profile: Profile, now: datetime) -> Sheet:
    """What the page of a version shows."""
    events = store.alias_events(profile.key)
    event = store.alias(profile.key, registry.CHAMPION)
    champion = version_of(store, event)
    names = sorted(e.alias for e in store.aliases(profile.key) if e.to_version == profile.version)
    alias = next((name for name in (registry.CHAMPION, "challenger") if name in names), "")
    trail = registry.trail([e for e in events if e.alias == registry.CHAMPION])
    return Sheet(
        profile=profile,
        aliases=names,
        events=events[::-1],
        champion=champion,
        changes=registry.diff(champion, profile) if champion else (),
        card=card_of_profile(store, profile, alias),
        failed=registry.gate_failures(profile, registry.Gates(), now=now),
        generation=event.generation if event else 0,
        frozen=store.alias_frozen(profile.key, registry.CHAMPION),
        before=trail[-2] if len(trail) > 1 else None,
        first=registry.serves_as(store, profile),
    )


def moves_to(store: Store, profile: Profile) -> list[AliasEvent]:
    """The moves of an alias to a version: when, by whom and why; the newest first."""
    events = store.alias_events(profile.key)[::-1]
    return [event for event in events if event.to_version == profile.version != event.from_version]


def argv_diff(before: Profile, after: Profile) -> list[str]:
    """The difference of two command lines, line by line: `- ` before removed lines, `+ ` before added lines;
    empty if they are equal.
    """
    found = [line for line in ndiff(before.argv, after.argv) if line[0] != "?"]
    return found if before.argv != after.argv else []


def promote(looks: Visitor, profile: Profile, fields: Mapping[str, str]) -> AliasEvent:
    """Moves the champion alias to a version. NotAllowed without scope promote. Without `force`, the gates
    must pass.
    """
    looks.needs("promote")
    reason, force = reason_of(fields), fields.get("force") == "yes"
    if force:
        looks.needs("admin")
    return looks.service.promote(
        looks.actor, profile, registry.CHAMPION, reason=reason, force=force, expected=_generation(fields)
    )


def rollback(looks: Visitor, profile: Profile, fields: Mapping[str, str]) -> AliasEvent:
    """Moves the champion alias of a version's key back. NotAllowed without scope promote."""
    looks.needs("promote")
    return looks.service.rollback(
        looks.actor, profile.key, registry.CHAMPION, reason=reason_of(fields), expected=_generation(fields)
    )


def _generation(fields: Mapping[str, str]) -> int:
    text = fields.get("generation", "")
    if not text.isdecimal() or len(text) > 9:
        raise BadInput("This form is not complete: load the page again.")
    return int(text)
