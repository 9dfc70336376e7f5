"""Command lines of container runtimes: which words are docker's, and which start vLLM in the image."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuner.knobs.shell import START, UNKNOWN

RUNTIMES = ("docker", "podman", "nerdctl")
SWITCHES = frozenset(
    re.split(
        r"\s+",
        "d detach i interactive t tty P publish-all q quiet rm init privileged read-only no-healthcheck"
        " replace oom-kill-disable sig-proxy disable-content-trust rmi env-host http-proxy no-hosts"
        " no-hostname tls-verify passwd help",
    )
)
"""Options of `run` that take no word after them; all others take one."""
IMAGE = re.compile(
    r"vllm|(?:^|/)llm-d(?:-(?:cuda|cpu|xpu|rocm|hpu|aws|gke|dev|gb200)\b[\w-]*)?(?=[:@]|$)", re.IGNORECASE
)
OTHERS = re.compile(
    r"router|sidecar|proxy|gateway|scheduler|exporter|bench|inference-sim|\bui\b|webui", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What a container runs: `words` after its image (with its entrypoint, if one is given)."""

    image: str
    words: tuple[str, ...]
    name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    env_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def is_vllm(image: str) -> bool:
    """Whether an image's entrypoint is vLLM's server, by the image's name."""
    name = image.rsplit("/", 1)[-1]
    return bool(IMAGE.search(image)) and not OTHERS.search(name)


def starts_vllm(words: Sequence[str]) -> bool:
    """Whether a command line starts vLLM."""
    return START.search(" ".join(words)) is not None


def run_of(words: Sequence[str]) -> Container | None:
    """What `docker run …` (podman, nerdctl) starts, whatever stands before it; None for another command."""
    for at, word in enumerate(words):
        if word.rsplit("/", 1)[-1] in RUNTIMES:
            verb = next((i for i in range(at + 1, len(words)) if words[i] in ("run", "create")), None)
            blank = verb is not None and not starts_vllm(words[at:verb])
            return _container(words[verb + 1 :]) if verb is not None and blank else None
    return None


def _container(words: Sequence[str]) -> Container | None:
    options, rest = _options(words)
    if not rest:
        return None
    env: dict[str, str] = {}
    notes: list[str] = []
    for value in options.get("e", []) + options.get("env", []):
        name, equals, given = value.partition("=")
        if equals:
            env[name] = given
        else:
            notes.append(f"{name} comes from the environment of the one who starts the container")
    entry = options.get("entrypoint", [""])[-1]
    read = ("e", "env", "entrypoint", "name", "env-file", "rm", "d", "detach", "it", "i", "t")
    if left := [("-" if len(name) == 1 else "--") + name for name in options if name not in read]:
        notes.append(f"not read of the container's own options: {' '.join(left)}")
    return Container(
        image=rest[0],
        words=(*([entry] if entry else []), *rest[1:]),
        name=options.get("name", [""])[-1],
        env=env,
        env_files=tuple(options.get("env-file", [])),
        notes=tuple(notes),
    )


def _options(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options with their values, and the words from the image on."""
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word.startswith(UNKNOWN) and word.endswith(UNKNOWN) and at + 1 < len(words):
            at += 1  # options in a variable that is not known here
            continue
        if not word.startswith("-") or word == "-":
            return found, list(words[at:])
        at += 1
        if word == "--":
            return found, list(words[at:])
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--") and not equals:
            name, value = _short(name, found)
        if not equals and not value and name not in SWITCHES and at < len(words):
            value = words[at]
            at += 1
        found.setdefault(name, []).append(value)
    return found, []


def _short(letters: str, found: dict[str, list[str]]) -> tuple[str, str]:
    """The last option of `-itp`, and what is glued to it (`-p8000:8000`)."""
    while len(letters) > 1 and letters[0] in SWITCHES:
        found.setdefault(letters[0], []).append("")
        letters = letters[1:]
    return letters[0], letters[1:]
