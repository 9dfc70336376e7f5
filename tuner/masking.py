"""Hides secrets in environments, logs, files and answers, and closes files to other users.

A secret is recognised by its name (`HF_TOKEN`, `--api-key`, `db.password`) or by its form (a URL with a
password, a bearer token, the tokens of Hugging Face, AWS, GitHub and others).
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# The text that replaces a secret.
MASK = "***"

# The permissions of group and others, and the mask of new files.
OTHERS = 0o077

# The folders of a home that hold traffic, secrets of engines, or what was found.
FOLDERS = ("logs", "traces", "captures", "uploads", "trials", "nodes", "studies", "controllers", "work")
_users_mask: int | None = None
_ALWAYS = re.compile(
    r"(?:^|-)(?:[a-z]*(?:password|passwd|passphrase|secret|credential)s?|pass|authorization|cookie|jwt|connection-string"
    r"|(?:api|access|secret|private|signing|license|auth|bearer|hf|hub|session)-?(?:key|token)s?)(?:-|$)"
)

# Such names may also have a value that is no secret: a number or a switch (`MAX_TOKENS=8`).
_OFTEN = re.compile(r"(?:^|-)(?:tokens?|keys?|pwd|sas)(?:-|$)")
_NOT_NAMES = frozenset(("pwd", "oldpwd"))
_HARMLESS = re.compile(r"-?[\d._]*[kmgt]?|true|false|yes|no|on|off|none|null|auto", re.IGNORECASE)
_PATHS = ("-file", "-path", "-dir")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_QUERY = (
    r"pass(?:word|wd)?|pwd|sslpassword|(?:access_|auth_)?token|api_?key|key|sig|signature|(?:client_)?secret"
    r"|x-amz-(?:signature|credential|security-token)"
)

# Hugging Face, OpenAI and Stripe, GitHub, GitLab, AWS, Slack, Google, NVIDIA, npm, PyPI, Docker, our own.
_TOKENS = (
    r"(?:hf|api_org)_[A-Za-z0-9]{16,}|(?:sk|pk|rk)[-_][\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}|xox[a-z]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|nvapi-[\w-]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{20,}"
    r"|tuner_[0-9a-f]{12}_[\w-]{20,}"
)
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(shape, re.IGNORECASE if instead else re.DOTALL), instead + MASK + after)
    for shape, instead, after in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", "", ""),
        (
            r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://[^\s/:@'\"]*:)(?!\d{1,5}(?:[/?#\s'\",]|$))[^\s'\"<>]{0,256}@",
            r"\1",
            "@",
        ),
        (r"((?:https?|git\+https?)://)[^\s/:@'\"]+@", r"\1", "@"),
        (rf"([?&](?:{_QUERY})=)[^&\s'\"]+", r"\1", ""),
        (r"(https://hooks\.slack\.com/(?:services|workflows)/)[^\s'\"]+", r"\1", ""),
        (
            r"(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?)(?!\s|\*|(?:bearer|basic|token)\s)[^\s'\",]+",
            r"\1",
            "",
        ),
        (r"\b(bearer\s+)(?=[^\s'\",]*[\d._~+/=-]|[^\s'\",]{20})[\w.~+/=-]{8,}", r"\1", ""),
        (r"(?<![A-Za-z0-9])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", "", ""),
        (rf"(?<![A-Za-z0-9])(?:{_TOKENS})(?![A-Za-z0-9])", "", ""),
    )
)
_NAMED = re.compile(
    r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?P<sign>['\"]?\s*[=:]\s*\[?)(?P<quote>['\"]?)(?P<value>[^\s'\",\]}&]+)"
)
_FLAG = re.compile(
    r"(?<!\S)(?P<name>--?[a-z][\w.-]*)(?P<sign>\s+)(?P<quote>['\"]?)(?P<value>(?!-)[^\s'\",\]]+)"
)


def is_secret(name: str, value: object = None) -> bool:
    """Whether a name is that of a secret. Its value may show that it is not one: a number, a switch, or a
    path under a name that ends in FILE, PATH or DIR.
    """
    words = "-".join(word.lower() for word in _WORD.findall(name))
    said = "" if value is None else str(value).strip()
    if words in _NOT_NAMES or (words.endswith(_PATHS) and (value is None or "/" in said)):
        return False
    if _ALWAYS.search(words):
        return value is None or said.lower() not in ("", "none", "null", "true", "false")
    return bool(_OFTEN.search(words)) and (value is None or not _HARMLESS.fullmatch(said))


def text(words: str) -> str:
    """A text with its secrets masked: by their shape, or by the name before them (`NAME=it`, `--name it`)."""
    for shape, instead in _SHAPES:
        words = shape.sub(instead, words)
    return _FLAG.sub(_hidden, _NAMED.sub(_hidden, words))


def _hidden(found: re.Match[str]) -> str:
    name, sign, quote, value = found["name"], found["sign"], found["quote"], found["value"]
    quoted = bool(quote) or sign[:1] in "'\""
    prose = name.lower() in ("key", "keys") or value.lower() in ("bearer", "basic")
    prose |= ":" in sign and not quoted and not re.search(r"[\d_=/+]", value)
    if prose or value.startswith(MASK) or not is_secret(name, value):
        return found[0]
    return f"{name}{sign}{quote}{MASK}"


def value(name: str, given: str) -> str:
    """One named value, masked if it is a secret."""
    return MASK if is_secret(name, given) else text(given)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """An environment with its secrets masked."""
    return {name: value(name, given) for name, given in env.items()}


def arguments(argv: Iterable[str]) -> tuple[str, ...]:
    """A command line with its secrets masked, also the values of secret flags."""
    shown: list[str] = []
    flag = ""
    for word in argv:
        shown.append(value(flag, word) if flag and not word.startswith("--") else text(word))
        if word.startswith("-"):
            flag = "" if "=" in word else word
    return tuple(shown)


def tree(given: Any, name: str = "") -> Any:
    """A JSON value with its secrets masked, each text by its key."""
    if isinstance(given, Mapping):
        return {key: tree(item, str(key)) for key, item in given.items()}
    if isinstance(given, list | tuple):
        if all(isinstance(item, str) for item in given) and not is_secret(name):
            return list(arguments(given))
        return [tree(item, name) for item in given]
    return value(name, given) if isinstance(given, str) else given


def redactor(env: Mapping[str, str]) -> Callable[[bytes], bytes]:
    """A filter for the output of a process: masks secrets by shape and name, and the secret values
    of `env`.
    """
    values = {given for name, given in env.items() if len(given) >= 6 and is_secret(name, given)}
    literal = [given.encode(errors="surrogateescape") for given in sorted(values, key=len, reverse=True)]

    def redact(line: bytes) -> bytes:
        for secret in literal:
            line = line.replace(secret, MASK.encode())
        return text(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    return redact


def mask_files() -> None:
    """Make new files of this process readable by its own user only: files 0600, folders 0700."""
    global _users_mask
    before = os.umask(OTHERS)
    if _users_mask is None:
        _users_mask = before


def users_mask() -> int:
    """The file mask that the user set, for programs that the tuner starts. -1: leave the mask as it is."""
    return -1 if _users_mask is None else _users_mask


def publish(path: Path) -> None:
    """Give a file that a person asked for the permissions of the user's own mask."""
    if _users_mask is not None:
        path.chmod(0o666 & ~_users_mask)


def tighten(home: Path) -> None:
    """Remove the permissions of group and others from an existing home, its files and its folders, since an
    earlier release left them open. Files of another user (a mounted volume) are not changed.
    """
    with suppress(OSError):
        mode = home.stat().st_mode
        shared = mode & stat.S_ISVTX or home.resolve() in (Path("/"), Path.home().resolve())
        if not shared:
            tighten_files([home])
        tighten_files([*home.glob("tuner*.db*"), home / "notify.yaml"])
        for name in FOLDERS:
            tighten_files(_below(home / name))


def tighten_files(paths: Iterable[Path]) -> None:
    """Remove the permissions of group and others from files that exist and belong to this user."""
    for path in paths:
        with suppress(OSError):
            found = path.lstat()
            ours = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
            if ours and found.st_mode & OTHERS and found.st_uid == os.geteuid():
                path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)


def _below(folder: Path) -> Iterator[Path]:
    """A folder and everything in it. A closed folder is not searched again, except `logs` and `traces`."""
    with suppress(OSError):
        was_open = folder.lstat().st_mode & OTHERS
        yield folder
        for root, folders, files in os.walk(folder) if was_open or folder.name in ("logs", "traces") else ():
            yield from (Path(root, name) for name in (*folders, *files))
