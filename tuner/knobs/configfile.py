"""YAML of engines: values inside documents, and mappings as a command line (vLLM's `--config`, charts). If
a file starts no vLLM, this module finds out what the file is, for the error message.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput
from tuner.records import canonical_json


def documents(text: str, where: str) -> list[dict[str, Any]]:
    """The YAML mappings of a text; none if it is a command line."""
    try:
        return [each.value for each in yamltext.documents(text, where) if isinstance(each.value, dict)]
    except BadInput:
        if where.endswith((".yaml", ".yml", ".json")):
            raise
        return []


def argv_of_mapping(mapping: Mapping[str, Any]) -> list[str]:
    """Keys and values as words of a command line. Keys may have dashes, underscores or camelCase. A key
    without a value is left out.
    """
    words: list[str] = []
    for key, value in mapping.items():
        flag = "--" + re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", str(key)).lower().replace("_", "-")
        if value is None or value == "":
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *(str(item) for item in value)]
        else:
            words += [flag, canonical_json(value) if isinstance(value, dict) else str(value)]
    return words


def as_list(raw: object) -> list[Any]:
    """A list as it is, anything else as its only item; empty for None."""
    return raw if isinstance(raw, list) else [] if raw is None else [raw]


def at(document: object, *path: str) -> Any:
    """The value under a path of keys (of lists: of places, as `walk` has them); None if one is missing."""
    for key in path:
        if isinstance(document, list):
            document = dict(enumerate(document)).get(int(key)) if key.isdigit() else None
        else:
            document = document.get(key) if isinstance(document, Mapping) else None
    return document


def walk(document: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a document with its path; a value comes before those inside it."""
    yield path, document
    inner = document.items() if isinstance(document, Mapping) else ()
    for key, value in enumerate(document) if isinstance(document, list) else inner:
        yield from walk(value, (*path, str(key)))


def environment(raw: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment of a Kubernetes container or compose service (a list or a mapping), and a note for
    each variable whose value is not in the file.
    """
    env: dict[str, str] = {}
    notes: list[str] = []
    if isinstance(raw, Mapping):
        raw = [{"name": name, "value": value} for name, value in raw.items()]
    for item in raw if isinstance(raw, list) else []:
        if isinstance(item, str):
            name, equals, value = item.partition("=")
            item = {"name": name, "value": value} if equals else {"name": name}
        if isinstance(item, Mapping) and item.get("value") is not None:
            value = item["value"]
            env[str(item.get("name"))] = str(value).lower() if isinstance(value, bool) else str(value)
        elif isinstance(item, Mapping) and item.get("name"):
            notes.append(f"{item.get('name')} comes from elsewhere in the cluster and is left out")
    return env, tuple(notes)


READ = (
    "a command line in quotes, a shell script, a batch file, a PowerShell script, a systemd unit,"
    " a Dockerfile, a compose file, a Kubernetes manifest, an Ansible playbook, Helm values,"
    " vLLM's --config file, or Markdown with such commands"
)
_SUFFIXES = {
    **dict.fromkeys((".md", ".markdown", ".rst", ".txt", ".html"), "a document"),
    **dict.fromkeys((".csv", ".tsv", ".jsonl"), "a table (a trace is given with --trace)"),
    **{each: f"a {each} file" for each in (".py", ".toml", ".ini", ".rs", ".go", ".js", ".ts")},
}
_BINARY = {
    b"PAR1": "Parquet (a trace is given with --trace)",
    b"\x7fELF": "a program",
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"SQLite format 3": "a SQLite database",
    b"GGUF": "the weights of a model",
    b"\x89PNG": "an image",
    b"%PDF": "a PDF",
}


def text_of(path: Path) -> str:
    """The text of a file. BadInput says what a file without text is."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder; give a file in it, or {READ}")
    try:
        start = path.read_bytes()[:4096]
    except OSError as error:
        raise BadInput(f"cannot read the file {path}: {error.strerror or error}") from error
    kind = next((kind for mark, kind in _BINARY.items() if start.startswith(mark)), None)
    if kind or b"\0" in start:
        raise BadInput(f"{path} is {kind or 'a binary file'}, and it starts no vLLM; give {READ}")
    text = yamltext.read(path)
    if not re.sub(r"(?m)^\s*#.*$", "", text).strip():
        only = "it has nothing but comments" if text.strip() else "it is empty"
        raise BadInput(f"{path}: {only}; give {READ}")
    return text


def without_vllm(text: str, where: str) -> BadInput:
    """The error for a text in which nothing starts vLLM: what it is, and what can be read."""
    kind = _kind(text, where)
    said = f"this is {kind}, and it starts no vLLM" if kind else "no vLLM is started there"
    return BadInput(f"{where}: {said} ('vllm serve …' or its api_server module); give {READ}")


def _kind(text: str, where: str) -> str:
    """In words what a text is; empty if nothing tells."""
    name, suffix = Path(where).name, Path(where).suffix.lower()
    if where == "command line":
        return ""
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if suffix in (".yaml", ".yml") and re.search(r"(?m)^[ -] *(hosts|tasks|roles)\s*:", text):
        return "an Ansible playbook (roles and included files are not read; give the file of their tasks)"
    if "{{" in text and suffix in (".yaml", ".yml", ".tpl"):
        return "a template of a Helm chart; give its values, or what `helm template` prints"
    if name == "Chart.yaml":
        return "the description of a Helm chart; give its values.yaml"
    return _kind_of_keys(text, where)


def _kind_of_keys(text: str, where: str) -> str:
    try:
        found: Any = json.loads(text) if text.lstrip().startswith(("{", "[")) else None
    except ValueError:
        return ""
    if isinstance(found, list):
        return "a JSON list"
    mappings: list[Mapping[str, Any]] = [found] if isinstance(found, dict) else list(documents(text, where))
    if not mappings:
        return ""
    first = mappings[0]
    if "architectures" in first or "model_type" in first:
        return "the config.json of a model (it is given with --hf-config)"
    if "runs" in first and "version" in first:
        return "a SARIF report"
    if isinstance(first.get("kind"), str):
        return "Kubernetes: " + ", ".join(dict.fromkeys(str(each.get("kind")) for each in mappings))
    if {"baseline", "traffic", "objectives", "workload"} & set(first):
        return "a study file of this tuner"
    keys = ", ".join(str(key) for key in list(first)[:5])
    return f"{'JSON' if isinstance(found, dict) else 'YAML'} with the keys {keys}"
