"""The settings of the tuner from `TUNER_*`, and the paths of its shipped files."""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path


def _default_home() -> Path:
    return Path.home() / ".local" / "share" / "tuner"


def _home() -> Path:
    return Path(os.environ.get("TUNER_HOME") or _default_home())


# Allowed names of studies, workloads, nodes, slices, spaces, traces, aliases, schedules and tokens.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`TUNER_HOME` holds trial directories, logs, traces and, without `TUNER_DATABASE_URL`, the database.
    `TUNER_ARTIFACTS` is a folder that several hosts mount, or a URL, in which traces are stored for all of
    them.
    """

    home: Path = field(default_factory=_home)
    database_url: str = field(default_factory=lambda: os.environ.get("TUNER_DATABASE_URL", ""))
    artifacts: str = field(default_factory=lambda: os.environ.get("TUNER_ARTIFACTS", ""))

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the history database."""
        return self.database_url or f"sqlite:///{self.home / 'tuner.db'}"


def variables() -> str:
    """The settings that are not the default, as a shell reads them before a command; each with a space after
    it. A database URL that may hold a password is left out.
    """
    ours = Settings()
    given = {"TUNER_HOME": "" if ours.home.absolute() == _default_home() else str(ours.home.absolute())}
    if not {"@", "?"} & {*ours.database_url}:
        given["TUNER_DATABASE_URL"] = ours.database_url
    return "".join(f"{name}={shlex.quote(value)} " for name, value in given.items() if value)


def runnable(command: str, program: str = "tuner") -> str:
    """A command that begins with `tuner`, as it works in any shell of this host: with `variables`. `program`
    is how this host calls the tuner.
    """
    return f"{variables()}{program}{command.removeprefix('tuner')}"


def under_home(stored: str, home: Path | None = None) -> Path:
    """The present path of a folder or file of a trial: in this home, also if the home was moved after the
    path was written. The stored path if this home has no such file.
    """
    parts = Path(stored).parts
    if "trials" not in parts:
        return Path(stored)
    last = len(parts) - 1 - parts[::-1].index("trials")
    here = (home or Settings().home).joinpath(*parts[last:])
    return here if here.exists() else Path(stored)


def shipped(*parts: str) -> Path:
    """A file or folder that is part of the package: `search_spaces`, `migrations`, `data`.

    In a wheel they are inside the package; in a checkout `search_spaces` and `migrations` are beside it.
    """
    package = Path(__file__).resolve().parent
    inside = package.joinpath(*parts)
    return inside if inside.exists() else package.parent.joinpath(*parts)
