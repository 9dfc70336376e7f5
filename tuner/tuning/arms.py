"""The arms of a comparison as people write them: what runs, and on which engine."""

import glob
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tuner import masking
from tuner.adapters import adapter_of
from tuner.errors import BadInput, NotFound, nearest
from tuner.history.store import Store
from tuner.knobs import manifests
from tuner.knobs.arguments import compile_candidate, fixed
from tuner.knobs.baseline import from_arguments
from tuner.records import JSON, Candidate, Profile, ProfileKey
from tuner.simulator.options import read_release
from tuner.tuning.study import ComparedArm, Prepared, flag_name, survey
from tuner.tuning.studyfile import Argument, EngineFile

# The study's baseline, and the engine's own defaults.
TODAY, DEFAULTS = "today", "defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmConfiguration:
    """What an arm runs: knobs, and arguments and environment beside the study's own."""

    candidate: Candidate
    args: Mapping[str, Argument]
    env: Mapping[str, str]


def arm_of(
    text: str,
    prepared: Prepared,
    store: Store | None,
    *,
    base: Path,
    engines: Mapping[str, EngineFile] | None = None,
    files: bool = True,
) -> ComparedArm:
    """The arm that `[NAME=]WHAT[@ENGINE]` describes; relative paths begin at `base`.

    WHAT is `today`, `defaults`, a profile's id, an alias of the study's profiles, a file that `tuner baseline
    import` reads, or a command line. ENGINE is an interpreter, an image (where the study's engine.command
    ends in one), a release file of the simulated engine, or one of `engines`. Without `files` neither a file
    nor a command line nor an interpreter is taken. BadInput or NotFound says what to mend.
    """
    name, what, engine = _parts(text)
    own = prepared if not engine else on_engine(prepared, engine, base=base, engines=engines, files=files)
    found = named_configuration(what, prepared, store, base, files)
    called = name or _short(what) + (f"@{own.facts.version}" if engine else "")
    return ComparedArm(
        name=called, candidate=found.candidate, prepared=with_configuration(own, found, called)
    )


def _parts(text: str) -> tuple[str, str, str]:
    """(name, what, engine); the last two may be empty."""
    named = re.fullmatch(r"([A-Za-z][\w.-]{0,30})=(?!=)(.*)", text.strip(), re.DOTALL)
    name, rest = (named[1], named[2].strip()) if named else ("", text.strip())
    at = re.fullmatch(r"(.*?)@(\S+)", rest, re.DOTALL)
    what, engine = (at[1].strip(), at[2]) if at else (rest, "")
    return name, what or TODAY, engine


def _short(what: str) -> str:
    """What a sentence calls it: a file by its name, a command line by its beginning."""
    if os.path.isfile(what):
        return Path(what).name
    return what if len(what) <= 40 else f"{what[:39]}…"


def with_configuration(prepared: Prepared, found: ArmConfiguration, name: str) -> Prepared:
    """The study with an arm's own arguments. UnsupportedKnob or BadInput where its engine refuses them."""
    engine = prepared.file.engine
    args = {**{flag_name(k)[2:]: v for k, v in engine.args.items()},
            **{flag_name(k)[2:]: v for k, v in found.args.items()}}  # fmt: skip
    env = {**engine.env, **found.env}
    file = prepared.file.model_copy(update={"engine": engine.model_copy(update={"args": args, "env": env})})
    compile_candidate(found.candidate, prepared.facts, env=env)
    return replace(
        prepared, file=file, baseline=found.candidate, fixed=fixed(args, prepared.facts, where=f"arm {name}")
    )


def named_configuration(
    what: str, prepared: Prepared, store: Store | None, base: Path, files: bool
) -> ArmConfiguration:
    if what == TODAY:
        return ArmConfiguration(candidate=prepared.baseline, args={}, env={})
    if what == DEFAULTS:
        return ArmConfiguration(candidate=Candidate(), args={}, env={})
    written = " " in what or what.startswith("-") or os.path.isfile(base / what)
    if written and files:
        return _imported(str(base / what) if os.path.isfile(base / what) else what)
    return configuration_of(profile_of(what, prepared, store, files=files))


def _imported(what: str) -> ArmConfiguration:
    found = manifests.read(what)
    return ArmConfiguration(candidate=found.candidate, args=dict(found.args), env=found.env)


def configuration_of(profile: Profile) -> ArmConfiguration:
    """What a profile runs: its knobs, and the arguments and variables that its study fixed."""
    imported = from_arguments(profile.argv, env=profile.env, source=f"profile {profile.id}")
    candidate = Candidate({**imported.candidate, **profile.candidate})
    return ArmConfiguration(candidate=candidate, args=dict(imported.args), env=imported.env)


def profile_of(what: str, prepared: Prepared, store: Store | None, *, files: bool = True) -> Profile:
    """The profile of an id or alias. NotFound names the nearest alias of the study's key; BadInput where it
    is of another model.
    """
    if store is None:
        raise NotFound(f"there is no history yet, so there is no profile '{what}'")
    if what.isdigit():
        profile = store.profile(int(what))
        if profile.key.model != prepared.study.model:
            raise BadInput(f"profile {what} is of {profile.key.model}, the study of {prepared.study.model}")
        return profile
    study = prepared.study
    targets = (study.node, study.gpu_class)
    keys = [ProfileKey(model=study.model, target=t, workload=study.workload) for t in targets]
    for key in keys:
        event = store.alias(key, what)
        if event is not None and event.to_version is not None:
            return store.profile_version(key, event.to_version)
    known = sorted({event.alias for key in keys for event in store.aliases(key)})
    others = "a file, a command line, " if files else ""
    raise NotFound(
        f"'{what}' is no alias of {study.model} on {study.node} for {study.workload}"
        f"{nearest(what, (*known, TODAY, DEFAULTS))}; an arm is {others}a profile's id, an alias"
        f" ({', '.join(known) or 'none yet'}), {TODAY} or {DEFAULTS}"
    )


def on_engine(
    prepared: Prepared,
    engine: str,
    *,
    base: Path,
    engines: Mapping[str, EngineFile] | None = None,
    files: bool = True,
) -> Prepared:
    """The study on another engine of its kind, which is asked what it has."""
    file = engine_file(prepared.file.engine, engine, base=base, engines=engines, files=files)
    found = survey(file, base=base)
    identity: dict[str, JSON] = {
        **prepared.study.identity,
        "engine": {
            **_section(prepared), "kind": file.kind, "version": found.facts.version,
            "platform": found.facts.platform, "command": list(masking.arguments(file.command)),
            "env": dict(masking.environment(file.env)),
        },
    }  # fmt: skip
    return replace(
        prepared, file=prepared.file.model_copy(update={"engine": file}), facts=found.facts,
        command=found.command, study=replace(prepared.study, identity=identity),
    )  # fmt: skip


def _section(prepared: Prepared) -> Mapping[str, JSON]:
    found = prepared.study.identity.get("engine")
    return found if isinstance(found, dict) else {}


def engine_file(
    engine: EngineFile,
    text: str,
    *,
    base: Path,
    engines: Mapping[str, EngineFile] | None = None,
    files: bool = True,
) -> EngineFile:
    """The engine of a study with another interpreter, image or release; of a pattern the newest match."""
    if engines and text in engines:
        return engines[text]
    if not files:
        raise NotFound(f"no engine '{text}' is registered for this node{nearest(text, engines or ())}")
    path = base / Path(text).expanduser()
    if "*" in text:
        found = glob.glob(str(path))
        if not found:
            raise BadInput(f"nothing matches {path}")
        path = Path(max(found, key=lambda each: os.lstat(each).st_mtime))
    if adapter_of(engine.kind).simulated:
        if not path.is_file():
            raise BadInput(f"'{text}' is no release file of the simulated engine (docs/compare.md)")
        return engine.model_copy(update={"env": {**engine.env, **read_release(path).environment()}})
    if path.is_file() or shutil.which(text):
        python = str(path) if path.is_file() else str(shutil.which(text))
        return engine.model_copy(update={"python": python, "command": (), "stop_command": ()})
    if engine.command and not engine.command[-1].startswith(("-", "{")):
        return engine.model_copy(update={"command": (*engine.command[:-1], text)})
    raise BadInput(
        f"there is no interpreter at {path}; for an image, engine.command of the study must end in an image"
    )
