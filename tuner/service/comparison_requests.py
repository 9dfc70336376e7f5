"""Comparisons and upgrade checks sent over HTTP: of profiles, aliases and registered engines only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, ConfigDict, Field

from tuner.history.store import Store
from tuner.service.problems import RequestBody
from tuner.settings import NAME
from tuner.tuning.comparison import MARGIN, MOST_ARMS, ROUNDS, arm_of, compared
from tuner.tuning.study import Prepared
from tuner.tuning.studyfile import EngineFile
from tuner.tuning.upgrade import upgrade_check

PART = NAME.strip("^$")
ArmText = Annotated[str, Field(pattern=rf"^({PART}=)?{PART}(@{PART})?$", max_length=200)]
EngineName = Annotated[str, Field(pattern=NAME, max_length=100, description="A registered engine's name.")]


class _Request(RequestBody):
    """What every comparison has; its configurations run in turns until every difference is known."""

    study: str = Field(min_length=1, max_length=100, description="A study's id or name.")
    rounds: int = Field(default=ROUNDS, ge=2, le=100, description="Launches of each arm, at most.")
    margin: float = Field(
        default=MARGIN, ge=0.01, lt=10, description="The smallest difference that matters: a share."
    )
    hours: float | None = Field(default=None, gt=0, le=24 * 14)
    deadline: AwareDatetime | None = Field(default=None, description="Be done by then.")
    reason: str = Field(default="asked for over HTTP", max_length=500)

    @property
    def _bounds(self) -> tuple[str, ...]:
        return ("--rounds", str(self.rounds), "--fail-if", f"worse:{self.margin}", "--registered")


class ComparisonRequest(_Request):
    """Two to five arms `[NAME=]WHAT[@ENGINE]`. WHAT is `today`, `defaults`, an alias or a profile's id;
    ENGINE is an engine that is registered for the node. The first arm is what the others are compared with.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"study": "chat-nightly", "arms": ["champion", "new=champion@next"], "hours": 2}]
        },
    )

    arms: list[ArmText] = Field(min_length=2, max_length=MOST_ARMS)

    def made(self, prepared: Prepared, store: Store, engines: Mapping[str, EngineFile]) -> Prepared:
        """The comparison of a study. BadInput or NotFound says what to mend."""
        found = [
            arm_of(text, prepared, store, base=Path(), engines=engines, files=False) for text in self.arms
        ]
        return compared(found, rounds=self.rounds, margin=self.margin)

    def words(self, path: Path) -> tuple[str, ...]:
        """The command of its controller."""
        return ("compare", *self.arms, "--study", str(path), *self._bounds)


class UpgradeRequest(_Request):
    """One configuration on two registered engines; `from` is the node's own engine unless it is given."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"study": "chat-nightly", "to": "next", "alias": "champion"}]},
    )

    to: EngineName
    old: EngineName | None = Field(default=None, alias="from")
    alias: str = Field(
        default="champion", pattern=NAME, max_length=100,
        description="What runs: an alias, a profile's id, today or defaults.",
    )  # fmt: skip

    def made(self, prepared: Prepared, store: Store, engines: Mapping[str, EngineFile]) -> Prepared:
        """The upgrade check of a study. BadInput or NotFound says what to mend."""
        return upgrade_check(
            prepared, store, old=self.old or "", new=self.to, configuration=self.alias, base=Path(),
            rounds=self.rounds, margin=self.margin, engines=engines, files=False,
        )  # fmt: skip

    def words(self, path: Path) -> tuple[str, ...]:
        """The command of its controller."""
        return upgrade_words(path, self.to, self.old or "", self.alias) + self._bounds


def upgrade_words(path: Path, new: str, old: str, alias: str) -> tuple[str, ...]:
    """The command of an upgrade check."""
    return ("upgrade-check", str(path), "--to", new, "--from", old, "--alias", alias)
