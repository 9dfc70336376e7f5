"""The long flags of each vLLM release, as shipped data (data/vllm_flags.json). This module asks no engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from tuner.errors import BadInput
from tuner.settings import shipped

# Older engines are refused; the data knows them only to explain what they lack.
OLDEST = Version("0.10")

# Characters of a version range; ranges are kept in memory, and a service takes them from requests.
LONGEST_RANGE = 200

# The first and the last release with a flag; None: the newest release in the data has it.
Interval = tuple[str, str | None]


@dataclass(frozen=True, kw_only=True)
class FlagTable:
    """`versions` in order; `paired` flags have a `--no-` form (since 0.9), `bare` ones take no value."""

    versions: tuple[str, ...]
    flags: Mapping[str, tuple[Interval, ...]]
    paired: frozenset[str]
    bare: frozenset[str]

    def floor(self, version: str) -> str:
        """The newest release in the data that is not newer than the version (the oldest if none is)."""
        known = [name for name, parsed in self._parsed if parsed <= parse(version)]
        return known[-1] if known else self.versions[0]

    def has(self, flag: str, version: str) -> bool:
        """Whether the release at or before the version has a flag that is no `--no-` form."""
        return flag in self._by_version[self.floor(version)]

    def flags_of(self, version: str) -> frozenset[str]:
        """Every long flag of the release at or before the version, `--no-` forms included."""
        floor = self.floor(version)
        present = self._by_version[floor]
        if parse(floor) < parse("0.9"):
            return present
        return present | {negation(flag) for flag in present & self.paired}

    @cached_property
    def _parsed(self) -> list[tuple[str, Version]]:
        return [(name, parse(name)) for name in self.versions]

    @cached_property
    def _by_version(self) -> dict[str, frozenset[str]]:
        at = {name: position for position, name in enumerate(self.versions)}
        newest = len(self.versions) - 1
        return {
            name: frozenset(
                flag
                for flag, spans in self.flags.items()
                if any(
                    at[first] <= at[name] <= (newest if last is None else at[last]) for first, last in spans
                )
            )
            for name in self.versions
        }


def negation(flag: str) -> str:
    """`--enforce-eager` → `--no-enforce-eager`."""
    return f"--no-{flag.removeprefix('--')}"


@cache
def parse(version: str) -> Version:
    """A version without its local part. A text that is no version (`dev`) counts as newer than all."""
    try:
        return Version(version.split("+", maxsplit=1)[0])
    except InvalidVersion:
        return Version("9999")


@lru_cache(maxsize=4096)
def specifier(text: str, where: str) -> SpecifierSet:
    """A version range such as `>=0.10,<0.33`. BadInput names the place of a wrong one."""
    try:
        if len(text) > LONGEST_RANGE:
            raise InvalidSpecifier
        return SpecifierSet(text)
    except InvalidSpecifier:
        shown = text if len(text) <= LONGEST_RANGE else f"{text[:LONGEST_RANGE]}…"
        raise BadInput(f"{where}: '{shown}' is no version range; write one like '>=0.10,<0.33'") from None


@lru_cache(maxsize=4096)
def matches(version: str, wanted: str) -> bool:
    """Whether a version, pre-releases included, is in a range; every version is in an empty range."""
    return specifier(wanted, "version range").contains(parse(version), prereleases=True)


def read_table(path: Path) -> FlagTable:
    """The table of a file in the shipped format."""
    raw = json.loads(path.read_text())
    return FlagTable(
        versions=tuple(raw["versions"]),
        flags={flag: tuple((first, last) for first, last in spans) for flag, spans in raw["flags"].items()},
        paired=frozenset(raw["paired"]),
        bare=frozenset(raw["bare"]),
    )


@cache
def table() -> FlagTable:
    """The shipped table."""
    return read_table(shipped("data", "vllm_flags.json"))
