"""Other releases of the simulated engine: what a new version may change, to try an upgrade check on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tuner import yamltext
from tuner.errors import BadInput, nearest
from tuner.records import Value, canonical_json

VERSION = "0.32.0"

# The environment variable that makes the simulated engine another release: its JSON.
VARIABLE = "TUNER_SIM_RELEASE"

Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]+$")]


class Release(BaseModel):
    """A release of the simulated engine beside the usual one. `slower` multiplies every step's time,
    `defaults` maps flags (without dashes in front) to their new default, `renamed` old flags to new ones,
    `gone` lists flags that it no longer takes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[str, Field(pattern=r"^\d+\.\d+[0-9a-z.+]*$")] = VERSION
    slower: float = Field(default=1.0, gt=0, le=100)
    defaults: dict[Flag, Value] = Field(default_factory=dict)
    renamed: dict[Flag, Flag] = Field(default_factory=dict)
    gone: tuple[Flag, ...] = ()

    @field_validator("defaults", "renamed", "gone", mode="before")
    @classmethod
    def _dashes(cls, found: object) -> object:
        if isinstance(found, dict):
            return {str(name).replace("_", "-"): value for name, value in found.items()}
        return [str(name).replace("_", "-") for name in found] if isinstance(found, list | tuple) else found

    def environment(self) -> dict[str, str]:
        """What starts the simulated engine as this release."""
        return {VARIABLE: canonical_json(self.model_dump(mode="json", exclude_defaults=True))}

    def check(self, flags: Mapping[str, object]) -> None:
        """BadInput for a flag that the engine never had; `flags` with dashes."""
        for name in (*self.defaults, *self.renamed, *self.gone):
            if f"--{name}" not in flags:
                known = [flag.removeprefix("--") for flag in flags]
                raise BadInput(f"{VARIABLE}: the simulated engine has no flag '{name}'{nearest(name, known)}")


def release_of(env: Mapping[str, str]) -> Release:
    """The release that an environment asks for. BadInput where its JSON is none."""
    text = env.get(VARIABLE)
    if not text:
        return Release()
    try:
        return _release(json.loads(text), VARIABLE)
    except ValueError as error:
        raise BadInput(f"{VARIABLE} is no JSON: {error}") from error


def read(path: Path) -> Release:
    """A release from a YAML or JSON file. BadInput names the file and the key."""
    return _release(yamltext.load(yamltext.read(path, "the release file"), str(path)).value, str(path))


def _release(found: object, where: str) -> Release:
    try:
        return Release.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        close = nearest(key, Release.model_fields)
        raise BadInput(f"{where}: {key or 'release'}: {first['msg']}{close}") from error
