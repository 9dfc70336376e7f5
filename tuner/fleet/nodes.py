"""What a node is: its fingerprint in its engine's and driver's own words, its labels, and who selects it."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.engine.gpu import Gpus
from tuner.errors import BadInput, NotFound, nearest
from tuner.history.store import Store
from tuner.records import Node
from tuner.tuning.study import Surveyed, survey
from tuner.tuning.studyfile import EngineFile

NAMES = ("name", "gpu", "class", "host")
"""What a selector may ask for beside labels."""


def fingerprint(
    name: str, engine: EngineFile, *, base: Path, labels: Mapping[str, str] | None = None
) -> Surveyed:
    """What this host is under that name: asks the engine's interpreter and the driver, starts no engine."""
    found = survey(engine, base=base, name=name)
    gpus = Gpus.open()
    node = replace(
        found.node,
        name=name,
        host=socket.gethostname(),
        driver=gpus.driver,
        labels=dict(labels or {}),
    )
    return replace(found, node=node)


def register(store: Store, node: Node) -> Node:
    """Write what is now known of a node; its state stays. Conflict when it became another machine class."""
    known = {each.name: each for each in store.nodes()}.get(node.name)
    if known is None:
        return store.add_node(node)
    if known.gpu_class != node.gpu_class:
        raise BadInput(
            f"node {node.name} was registered as {known.gpu_class} and is {node.gpu_class} now:"
            " give the new machine a name of its own"
        )
    return store.add_node(replace(node, labels={**known.labels, **node.labels}, state=known.state))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """`key=value` pairs that all must hold; no pair selects every node."""

    pairs: tuple[tuple[str, str], ...] = ()

    def matches(self, facts: Mapping[str, str]) -> bool:
        """Whether a node with these facts and labels is meant. Whole words of a gpu or class are enough."""
        return all(_holds(key, value, facts) for key, value in self.pairs)

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.pairs) or "all"


def _holds(key: str, value: str, facts: Mapping[str, str]) -> bool:
    found = facts.get(key, "").lower()
    if key in ("gpu", "class"):
        return re.search(rf"(^|-){re.escape(value.lower())}(-|x\d|$)", found) is not None
    return found == value.lower()


def selector(texts: Sequence[str]) -> Selector:
    """`gpu=a100,zone=eu` → Selector; several texts must all hold. `all` selects every node."""
    pairs: list[tuple[str, str]] = []
    for text in texts:
        for part in (p.strip() for p in text.split(",")):
            if part in ("", "all"):
                continue
            key, sign, value = part.partition("=")
            if not sign or not key.strip() or not value.strip():
                raise BadInput(f"--nodes {text}: '{part}' is not KEY=VALUE, such as gpu=a100 or name=node-3")
            pairs.append((key.strip(), value.strip()))
    return Selector(pairs=tuple(pairs))


def chosen(all_facts: Mapping[str, Mapping[str, str]], wanted: Selector) -> tuple[str, ...]:
    """The names of the nodes that a selector means, sorted. NotFound or BadInput tells what there is."""
    found = sorted(name for name, facts in all_facts.items() if wanted.matches(facts))
    if found:
        return tuple(found)
    keys = sorted({key for facts in all_facts.values() for key in facts} | set(NAMES))
    for key, _ in wanted.pairs:
        if key not in keys:
            raise BadInput(f"--nodes {wanted}: no node has a label '{key}'{nearest(key, keys)}")
    there = "; ".join(f"{name} ({_brief(facts)})" for name, facts in sorted(all_facts.items()))
    raise NotFound(
        f"--nodes {wanted} selects none of the cluster's nodes: {there or 'it has none with GPUs'}"
    )


def _brief(facts: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(facts.items()) if key != "name" and value)
