"""Which engines this service may start: one file per node, written by whoever administers it, never by HTTP.

`TUNER_HOME/nodes/NODE.yaml` holds `engine:` (as in a study file) and `models:` (the names that a study sent
over HTTP may use there).
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuner.errors import BadInput, NotFound, nearest
from tuner.fleet import hooks
from tuner.tuning.studyfile import EngineFile


class NodeFile(BaseModel):
    """What a node's file says of its engine; `handover` is the fleet's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineFile
    models: tuple[str, ...] = Field(min_length=1)


def registered(home: Path) -> dict[str, Path]:
    """Node → its file."""
    return {path.stem: path for path in sorted((home / "nodes").glob("*.yaml"))}


def engine_of(home: Path, node: str) -> NodeFile:
    """What is registered for a node. NotFound when nothing is; BadInput when its file is wrong."""
    known = registered(home)
    path = known.get(node)
    if path is None:
        raise NotFound(
            f"no engine is registered for node '{node}'{nearest(node, known)}: whoever runs the service"
            f" writes nodes/{node}.yaml in its TUNER_HOME"
        )
    try:
        found = {key: value for key, value in hooks.document(path).items() if key != "handover"}
        return NodeFile.model_validate(found)
    except (BadInput, ValidationError) as error:
        lines = " ".join(str(error).split())
        raise BadInput(f"the file of node '{node}' is not valid: {lines[:300]}") from error
