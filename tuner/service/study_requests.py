"""A study sent over HTTP → a study file of the service's own; and comparisons and upgrade checks, of
profiles, aliases and registered engines only.

No path, command, environment or engine is taken: the engine is the node's, the trace a digest or name, the
space a shipped name or checked content. An administrator writes `TUNER_HOME/nodes/NODE.yaml`, which holds
`engine:` (as in a study file) and `models:` (the names that a study sent over HTTP may use there).
"""

import json
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from tuner.errors import BadInput, Conflict, NotFound, TunerError, Unavailable, nearest
from tuner.fleet import hooks
from tuner.history.store import Store
from tuner.knobs import space as spaces
from tuner.knobs.catalogue import CATALOGUE
from tuner.records import JSON, Study, Value, digest_of
from tuner.service.problems import RequestBody
from tuner.service.uploads import SPARE
from tuner.settings import NAME, Settings
from tuner.tuning import study as studies
from tuner.tuning.comparison import MARGIN, MOST_ARMS, ROUNDS, arm_of, compared
from tuner.tuning.study import (
    BudgetFile,
    PlanFile,
    PlanName,
    Prepared,
    QualityFile,
    SliceFile,
    SloFile,
    WeightsFile,
)
from tuner.tuning.survey import EngineFile, Scalar
from tuner.tuning.upgrade import upgrade_check


class NodeFile(BaseModel):
    """What a node's file says about its engine; `fleet` reads `handover`. A comparison may use the others of
    its `engines`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineFile
    engines: dict[str, EngineFile] = Field(default_factory=dict)
    models: tuple[str, ...] = Field(min_length=1)


def registered(home: Path) -> dict[str, Path]:
    """Each registered node, with its file."""
    return {path.stem: path for path in sorted((home / "nodes").glob("*.yaml"))}


def engine_of(home: Path, node: str) -> NodeFile:
    """The engine that is registered for a node. NotFound if there is none; BadInput if the node's file is
    wrong.
    """
    known = registered(home)
    path = known.get(node)
    if path is None:
        raise NotFound(
            f"no engine is registered for node '{node}'{nearest(node, known)}. Whoever runs the service"
            f" must write nodes/{node}.yaml in its TUNER_HOME"
        )
    try:
        found = {key: value for key, value in hooks.document(path).items() if key != "handover"}
        return NodeFile.model_validate(found)
    except (BadInput, ValidationError) as error:
        lines = " ".join(str(error).split())
        raise BadInput(f"the file of node '{node}' is not valid: {lines[:300]}") from error


def engines_of(home: Path, node: str) -> dict[str, EngineFile]:
    """The other engines that are registered for a node, by name; empty if the node has no file."""
    return engine_of(home, node).engines if node in registered(home) else {}


WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,63}")
"""A text value: one word that is not a path, an address, a module or a flag."""
LONGEST_VALUE = 4000
MODEL_KEYS = frozenset(("model", "draft_model"))
OBJECTS = {
    "speculative_config": {
        "acceptance_method": str,
        "disable_by_batch_size": int,
        "disable_padded_drafter_batch": bool,
        "draft_model": str,
        "draft_tensor_parallel_size": int,
        "max_model_len": int,
        "method": str,
        "model": str,
        "num_speculative_tokens": int,
        "prompt_lookup_max": int,
        "prompt_lookup_min": int,
        "quantization": str,
    }
}
"""Keys and types of objects that may be set over HTTP. A knob that is an object and is not listed here is
refused.
"""


def check(knob: str, values: Iterable[Value], models: Collection[str], where: str) -> None:
    """Raises BadInput for a value that must not be set over HTTP; `models` are the models that the node
    allows.
    """
    entry = CATALOGUE.get(knob)
    if entry is None:
        raise BadInput(f"{where}: '{knob}' is not a knob{nearest(knob, CATALOGUE)}")
    for value in values:
        if not isinstance(value, str) and value is not None and not abs(value) < spaces.LARGEST_NUMBER:
            raise BadInput(f"{where}: {knob}: a number below {spaces.LARGEST_NUMBER:g} is expected")
        if isinstance(value, str) and len(value) > LONGEST_VALUE:
            raise BadInput(f"{where}: {knob}: longer than {LONGEST_VALUE} characters")
        if not isinstance(value, str) or entry.kind in ("preemption", "ints"):
            continue
        if entry.kind == "json":
            _object(knob, value, models, f"{where}: {knob}")
        elif not WORD.fullmatch(value):
            raise BadInput(f"{where}: {knob}: '{value[:80]}' cannot be set over HTTP: it must be one word")


def _object(knob: str, text: str, models: Collection[str], where: str) -> None:
    known = OBJECTS.get(knob, {})
    try:
        found: JSON = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: '{text[:80]}' is not a JSON object") from None
    if not known or not isinstance(found, dict):
        raise BadInput(f"{where} cannot be set over HTTP: write it in a study file on the node")
    for key, value in found.items():
        if key not in known:
            raise BadInput(f"{where}: '{key[:80]}' cannot be set over HTTP{nearest(key, known)}")
        if value is None:
            continue
        if type(value) is not known[key]:
            raise BadInput(f"{where}: {key}: a {known[key].__name__} is expected")
        if isinstance(value, str):
            _text(key, value, models, where)
        elif isinstance(value, int) and not abs(value) < spaces.LARGEST_NUMBER:
            raise BadInput(f"{where}: {key}: a number below {spaces.LARGEST_NUMBER:g} is expected")


def _text(key: str, value: str, models: Collection[str], where: str) -> None:
    if key in MODEL_KEYS and value in (*models, "ngram"):
        return
    if key in MODEL_KEYS:
        raise BadInput(
            f"{where}: {key}: '{value[:80]}' is not allowed on this node; allowed are: {', '.join(models)}"
        )
    if not WORD.fullmatch(value):
        raise BadInput(f"{where}: {key}: '{value[:80]}' cannot be set over HTTP: it must be one word")


Name = Annotated[str, Field(pattern=NAME, max_length=100)]
LARGEST_SPACE = 64 * 1024
PREPARED_AT_ONCE, WAIT_S = 2, 10.0
"""Studies that are prepared at the same time, and how long another one waits, because each reads its whole
trace.
"""
_preparing = threading.BoundedSemaphore(PREPARED_AT_ONCE)


class StudyRequest(RequestBody):
    """A study as in a study file, but without an engine. It runs on the node's engine."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "chat-nightly",
                    "model": "Qwen/Qwen2.5-7B-Instruct",
                    "workload": "chat",
                    "node": "gpu-1",
                    "trace": "latest:chat",
                    "space": "bursty-mixed",
                    "baseline": {"max_num_seqs": 256},
                    "slo": {"ttft_ms": 500, "tpot_ms": 50},
                    "budget": {"trials": 20},
                }
            ]
        },
    )

    name: Name
    model: str = Field(min_length=1, max_length=200)
    workload: Name = "default"
    node: Name = "local"
    trace: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=200)
    space: Name | dict[str, JsonValue]
    baseline: dict[str, Scalar] = Field(default_factory=dict, max_length=64)
    history: Literal["synthetic", "session", "live"] = "synthetic"
    slices: Literal["auto"] | Annotated[list[SliceFile], Field(min_length=1, max_length=32)] = "auto"
    speed: float = Field(default=1.0, gt=0, le=1000)
    plan: PlanName | PlanFile = "standard"
    slo: SloFile = Field(default_factory=SloFile)
    objectives: list[str] = Field(
        default=["ttft_p95_ms", "tpot_p95_ms", "goodput_rps"], min_length=1, max_length=8
    )
    winner: Literal["slo", "knee"] | WeightsFile = "slo"
    not_worse: dict[str, float | str] = Field(default_factory=dict, max_length=8)
    live_limits: Literal["auto", "off"] = "auto"
    sampler: Literal["tuner", "tpe", "gp", "nsga2", "random", "ladder"] = "tuner"
    quality: QualityFile | Literal["off"] = Field(default_factory=QualityFile)
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    budget: BudgetFile = Field(default_factory=BudgetFile)

    seed: int = Field(default=0, ge=0, lt=2**63)


# (a study, the history, the engines that are registered for its node) → a comparison of it.
Making = Callable[[Prepared, Store, Mapping[str, EngineFile]], Prepared]
Free = Callable[[Study], None]
"""Raises Conflict if a study cannot be run now."""


class StudyFiles:
    """The study files of this service: sent over HTTP, or written by an administrator."""

    def __init__(self, store: Store, settings: Settings, clock: Callable[[], datetime]) -> None:
        self._store, self._home, self._clock = store, settings.home, clock

    @property
    def folder(self) -> Path:
        return self._home / "studies"

    def add(self, asked: StudyRequest, actor: str) -> Prepared:
        """Checks a study as `tuner tune` does before its first launch, and keeps its file. Conflict if
        another token owns a study of this name or this study with other limits, or if the disk is full.
        """
        node = engine_of(self._home, asked.node)
        if asked.model not in node.models:
            known = ", ".join(node.models)
            raise BadInput(
                f"model: '{asked.model}' is not allowed on node '{asked.node}'"
                f"{nearest(asked.model, node.models)}; allowed are: {known}"
            )
        for knob, value in asked.baseline.items():
            check(knob, [value], node.models, "baseline")
        space, trace = self._space(asked.space, node.models), self._store.trace(asked.trace)
        body: dict[str, JSON] = asked.model_dump(mode="json")
        body |= {"trace": trace.digest, "space": space, "engine": node.engine.model_dump(mode="json")}
        text = json.dumps(body, indent=1)
        file = studies.parse(text, name="study")
        with _one_of_few():
            prepared = studies.prepare(
                file, name="study", base=self.folder, store=self._store, now=self._clock()
            )
        self._refuse(prepared.study, text, actor)
        write_private(self.folder / f"{prepared.study.id}.yaml", text.encode())
        self._keep(prepared)
        return prepared

    def _refuse(self, study: Study, text: str, actor: str) -> None:
        """Raises Conflict if another token has a study of the same name, or the same study with another
        budget. Its schedules and pipelines would otherwise run this study.
        """
        named = study
        with suppress(TunerError):  # none has that name, or several ids begin with it
            named = self._store.study(study.name)
        makers = self._store.actors("study", [named.id, study.id], first=True)
        path = self.folder / f"{study.id}.yaml"
        same = path.is_file() and path.read_bytes() == text.encode()
        for found in (named, study):
            maker = makers.get(found.id, actor)
            if maker != actor and not same and found.name == study.name:
                what = "the name of a study" if found is named else "a study"
                raise Conflict(
                    f"'{study.name}' is {what} that {maker} made; change `name` and `seed` in your study file"
                )
        if shutil.disk_usage(self._home).free < SPARE:
            raise Conflict("there is less than 1 GiB of room on the service's disk")

    def _keep(self, prepared: Prepared, free: Free | None = None) -> str:
        """Stores the study's row, and the row of its node if it is new. A new study is stored only if `free`
        does not raise.
        """
        if free is not None:
            try:
                self._store.study(prepared.study.id)
            except NotFound:
                free(prepared.study)
        try:
            self._store.node(prepared.node.name)
        except NotFound:
            self._store.add_node(replace(prepared.node, host=socket.gethostname()))
        return self._store.add_study(prepared.study).id

    def _space(self, space: str | dict[str, JsonValue], models: Collection[str]) -> str:
        """The name of a shipped space, or the file with the space of the request, which was checked."""
        if isinstance(space, str):
            if space not in spaces.names():
                raise BadInput(f"space: there is no space '{space}'{nearest(space, spaces.names())}")
            return space
        if "accept" in space:
            raise BadInput("space: 'accept' (knobs outside the catalogue) cannot be set over HTTP")
        text = json.dumps(space, indent=1, sort_keys=True)
        if len(text) > LARGEST_SPACE:
            raise BadInput(f"space: larger than {LARGEST_SPACE} bytes")
        for knob, levels in spaces.parse(text, where="space").levels.items():
            check(knob, levels, models, "space")
        name = f"space-{digest_of(text)[:32]}.yaml"
        write_private(self.folder / name, text.encode())
        return name

    def known(self, ref: str) -> tuple[str | None, Path]:
        """(the file of a study that can be run here, its id). The study is found by id, by name, or by the
        name of a file in `studies/`. The id is None for a file that an administrator wrote. NotFound, or
        Conflict if the study was not made here.
        """
        if re.fullmatch(NAME, ref) and (path := self.folder / f"{ref}.yaml").is_file():
            return (ref if re.fullmatch(r"[0-9a-f]{64}", ref) else None), path
        try:
            study = self._store.study(ref)
        except NotFound as error:
            known = [path.stem for path in self.folder.glob("*.yaml")]
            raise NotFound(f"{error}{'' if '(did' in str(error) else nearest(ref, known)}") from None
        path = self.folder / f"{study.id}.yaml"
        if not path.is_file():
            raise Conflict(
                f"study '{study.name}' was not made here. POST it to /v1/studies, or ask whoever runs"
                " the service to put its file under studies/ in TUNER_HOME"
            )
        return study.id, path

    def find(self, ref: str, free: Free | None = None) -> tuple[str, Path]:
        """A study's id and file. A file that an administrator wrote is prepared first, so that it has an id.
        Errors of `free` are raised.
        """
        study_id, path = self.known(ref)
        return study_id or self._prepared(path, free), path

    def find_scheduled(self, ref: str, free: Free | None = None) -> tuple[str, Path]:
        """As `find`, but a schedule that was made by command line may name a file by its path."""
        path = Path(ref)
        return (self._prepared(path, free), path) if path.is_absolute() else self.find(ref, free)

    def compared(self, ref: str, make: Making, free: Free | None = None) -> tuple[str, Path]:
        """(the id of the comparison that `make` makes from a study, the study's file). Errors of `free` are
        raised.
        """
        path = Path(ref) if Path(ref).is_absolute() else self.known(ref)[1]
        with _one_of_few():
            prepared = studies.load(path, store=self._store, now=self._clock())
            made = make(prepared, self._store, engines_of(self._home, prepared.study.node))
        return self._keep(made, free), path

    def _prepared(self, path: Path, free: Free | None = None) -> str:
        with _one_of_few():
            prepared = studies.load(path, store=self._store, now=self._clock())
        return self._keep(prepared, free)


@contextmanager
def _one_of_few() -> Iterator[None]:
    """Waits until fewer studies are being prepared. Unavailable if this takes too long."""
    if not _preparing.acquire(timeout=WAIT_S):
        raise Unavailable(f"{PREPARED_AT_ONCE} studies are being prepared; try again")
    try:
        yield
    finally:
        _preparing.release()


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read, completely or not at all. Unavailable if this fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(".partial", f"{path.stem[:100]}.", path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise Unavailable(f"cannot write {path.name}: {error.strerror or error}") from error


PART = NAME.strip("^$")
ArmText = Annotated[str, Field(pattern=rf"^({PART}=)?{PART}(@{PART})?$", max_length=200)]
EngineName = Annotated[str, Field(pattern=NAME, max_length=100, description="A registered engine's name.")]


class _Request(RequestBody):
    """The fields of every comparison. Its configurations run in turns until every difference is known."""

    study: str = Field(min_length=1, max_length=100, description="A study's id or name.")
    rounds: int = Field(default=ROUNDS, ge=2, le=100, description="Launches of each arm, at most.")
    margin: float = Field(
        default=MARGIN, ge=0.01, lt=10, description="The smallest difference that matters: a share."
    )
    hours: float | None = Field(default=None, gt=0, le=24 * 14)
    deadline: AwareDatetime | None = Field(default=None, description="End before this time.")
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
        """The comparison of a study. BadInput or NotFound says what to correct."""
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
        """The upgrade check of a study. BadInput or NotFound says what to correct."""
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
