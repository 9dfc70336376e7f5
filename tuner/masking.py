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
    r"|(?:api|access|secret|private|signing|license|auth|bearer|hf|hub|session|subscription)-?(?:key|token)s?|oauth-2-bearer)(?:-|$)"
)

# Such names may also have a value that is no secret: a number or a switch (`MAX_TOKENS=8`).
_OFTEN = re.compile(r"(?:^|-)(?:tokens?|keys?|pwd|sas)(?:-|$)")
_COUNTS = re.compile(
    r"(?:^|-)(?:max|min|num|prompt|completion|input|output|batched|total|prefill|decode)-(?:.*-)?tokens"
)
_NOT_NAMES = frozenset(("pwd", "oldpwd", "image-pull-secrets"))
_HARMLESS = re.compile(r"-?[\d._]*[kmgt]?|true|false|yes|no|on|off|none|null|auto", re.IGNORECASE)
_PATHS = ("-file", "-path", "-dir")
_NO_SECRETS = ("-name", "-ref", "-error")
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
_CURL = r"\bcurl\b(?:[^\n|]|\\\n){0,200}?\s"
_MASKED = r"(?:(?:bearer|basic|token)\s+)?" + re.escape(MASK) + r".*"
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
        (r"((?<![\w.])(?:set-)?cookie2?['\"]?\s*[:=]\s*b?['\"]?)(?=[^\s=;'\"]+=)[^'\"\r\n]+", r"\1", ""),
        (rf"({_CURL}(?:-u|-U|--user|--proxy-user)(?:\s+|=)?['\"]?[^\s:'\"]+:)[^\s'\"]+", r"\1", ""),
        (
            rf"({_CURL}(?:-b|--cookie)(?:\s+|=)?)(?:'[^'\n]*=[^'\n]*'|\"[^\"\n]*=[^\"\n]*\"|[^\s'\"=]+=\S+)",
            r"\1",
            "",
        ),
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
_VALUE = r"(?P<list>\[)?(?P<quote>\\?['\"])?(?P<value>(?(list)[^\]\n]+|(?(quote)(?:(?!(?P=quote)).)+|{})))"
_BARE = r"(?![\w.-]+:\s)[^\s'\",\]}&]+"
# Where a name stands before its value, and the value: `NAME=it`, `NAME: it`; then as two texts,
# `("x-api-key", "it")`, `"--api-key", "it"` or `name: API_KEY, value: it`; then `--name it`.
_NAMED = (
    (
        re.compile(r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?P<sign>\\?['\"]?\s*[=:]\s*b?)"),
        re.compile(_VALUE.format(_BARE)),
    ),
    (
        re.compile(
            r"(?:\(b?['\"]|(?<=['\"])(?=--)|(?P<env>\bname\\?['\"]?\s*[:=]\s*\\?['\"]?))"
            r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)"
            r"(?P<sign>(?(env)\\?['\"]?\s*,?\s*\\?['\"]?value\\?['\"]?\s*[:=]\s*|['\"]\s*,\s*b?(?=['\"])))"
        ),
        re.compile(_VALUE.format(_BARE)),
    ),
    (
        re.compile(r"(?<!\S)(?P<name>--?[a-z][\w.-]*)(?P<sign>\s+)"),
        re.compile(_VALUE.format(r"(?!-)[^\s'\",\]]+")),
    ),
)

# A word after a name and a colon that begins a sentence, and is no secret.
_SENTENCE = frozenset(
    re.findall(
        r"\w+",
        """
    a an and any are as at be but by can cannot empty expected expired failed for found from given has have
    hidden how if in incorrect invalid is it its like look may missing must name need needed needs no none not
    null of on only or optional please provide provided read refused rejected required see set should some
    such that the this to unknown unset use used using was were what when where which will with wrong you your
    """,
    )
)


def is_secret(name: str, value: object = None) -> bool:
    """Whether a name is that of a secret. Its value may show that it is not one: a number, a switch, or a
    path under a name that ends in FILE, PATH or DIR.
    """
    words = "-".join(word.lower() for word in _WORD.findall(name))
    said = "" if value is None else str(value).strip()
    if (
        words in _NOT_NAMES
        or words.endswith(_NO_SECRETS)
        or (words.endswith(_PATHS) and (value is None or "/" in said))
    ):
        return False
    if _ALWAYS.search(words):
        return value is None or said.lower() not in ("", "none", "null", "true", "false")
    return bool(_OFTEN.search(words) and not _COUNTS.search(words)) and (
        value is None or not _HARMLESS.fullmatch(said)
    )


def text(words: str) -> str:
    """A text with its secrets masked: by their shape, or by the name before them (`NAME=it`, `--name it`)."""
    for shape, instead in _SHAPES:
        words = shape.sub(instead, words)
    for before, after in _NAMED:
        words = _without_named(words, before, after)
    return words


def _without_named(words: str, before: re.Pattern[str], after: re.Pattern[str]) -> str:
    """A text without the secret values that stand after their names. What follows a name that is none of a
    secret is searched again, since it may hold one.
    """
    made, at = [], 0
    while (named := before.search(words, at)) is not None:
        end = named.end()
        made.append(words[at:end])
        given = after.match(words, end) if _may_be_secret(named["name"]) else None
        if given is not None and _hides(named, given):
            made.append(
                words[end : given.start("quote" if given["list"] and given["quote"] else "value")] + MASK
            )
            end = given.end()
        at = end
    return "".join((*made, words[at:]))


def _may_be_secret(name: str) -> bool:
    words = "-".join(word.lower() for word in _WORD.findall(name))
    return name.lower() not in ("key", "keys") and bool(_ALWAYS.search(words) or _OFTEN.search(words))


def _hides(named: re.Match[str], given: re.Match[str]) -> bool:
    """Whether the value after a name is a secret."""
    name, value = named["name"], given["value"]
    items = re.split(r"['\"]?,\s*['\"]?", value) if given["list"] else [value]
    if value.lower() in ("bearer", "basic") or re.fullmatch(_MASKED, value, re.IGNORECASE):
        return False
    plain = not given["quote"] and named["sign"][:1] not in "'\"\\"
    if plain and ":" in named["sign"] and _is_sentence(named, given):
        return False
    return any(is_secret(name, item) for item in items)


def _is_sentence(named: re.Match[str], given: re.Match[str]) -> bool:
    """Whether the word after `name:` is one of a sentence and no secret: a secret has digits or signs, or
    stands after the name of a header or of a setting, or alone with its name on the line.
    """
    name, value, text = named["name"], given["value"], named.string
    if re.search(r"[\d_=/+]", value):
        return False
    words = "-".join(word.lower() for word in _WORD.findall(name))
    before = text[text.rfind("\n", 0, named.start()) + 1 : named.start()]
    after = text[given.end() : given.end() + 200].partition("\n")[0]
    alone = not before.strip(" \t<>*-{[") and after.strip()[:1] in ("", ",", ";", "}", "]")
    setting = "-" in words and (name.lower().startswith("x-") or bool(_ALWAYS.search(words)))
    return value.lower().rstrip(".,;!") in _SENTENCE or not (
        setting or (alone and (_ALWAYS.search(words) or words in ("token", "pwd")))
    )


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
        named = str(given.get("name", "value"))  # an item of a Kubernetes environment
        return {key: tree(item, named if key == "value" else str(key)) for key, item in given.items()}
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
