"""Rules of the profile registry: publish, promote, roll back, resolve. A Store keeps the rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Literal

from packaging.version import InvalidVersion, Version

from tuner.errors import BadInput, Conflict, NotFound, nearest
from tuner.history.best_per_night import Change, Configuration, changes
from tuner.history.store import Store
from tuner.knobs.catalogue import CATALOGUE
from tuner.measures import is_maximized, many
from tuner.profiles.export import split_flags
from tuner.records import JSON, AliasEvent, Node, Profile, ProfileKey, Study, Trial, pack_values

PREEMPTION_FLAGS = {"preemption-mode", "swap-space", "kv-offloading-size", "kv-offloading-backend"}
"""What the preemption knob writes."""
CHALLENGER = "challenger"
CHAMPION = "champion"
BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """The checks that a version must pass before an alias may move to it. None and False skip a check.

    `engine_version` is the engine that is to run it. The other gates read the evidence. `not_worse`
    compares every change that the run found with the study's limits. `judged`: no knob changes the answers,
    or they were compared with the baseline's, or the study said `quality: off`. The others are `confirmed`,
    `slo_met`, and the age since publication.
    """

    confirmed: bool = True
    slo_met: bool = True
    judged: bool = True
    not_worse: bool = True
    max_age: timedelta | None = timedelta(days=30)
    engine_version: str | None = None


NO_GATES = Gates(confirmed=False, slo_met=False, judged=False, not_worse=False, max_age=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The answer to a pull: the profile, the alias event that points to it, and whether node or class
    matched.
    """

    profile: Profile
    event: AliasEvent
    matched: Literal["node", "class"]

    def etag(self, format: str) -> str:
        """Strong validator: changes with the alias, the content and the format."""
        return f'"{self.profile.digest[:32]}-{self.event.generation}-{format}"'


def key_of(study: Study, *, target: str | None = None) -> ProfileKey:
    """The profile key of a study: its node, unless another target (a GPU class) is named."""
    return ProfileKey(model=study.model, target=target or study.node, workload=study.workload)


def publish(
    store: Store,
    *,
    study: Study,
    trial: Trial,
    argv: Sequence[str],
    env: Mapping[str, str],
    evidence: Mapping[str, JSON],
    now: datetime,
    alias: str | None = CHALLENGER,
    actor: str = "tuner",
    reason: str = "won its run",
    target: str | None = None,
) -> Profile:
    """Writes the winner as the next version of its key and moves `alias` to it (None: no alias).

    `evidence` is what the run knows (docs/profiles.md names the keys that gates read); the study's facts and
    the trial's numbers are added. Any alias but `challenger` and `baseline` passes the default gates first,
    after the version is written.
    """
    profile = store.add_profile(
        key=key_of(study, target=target),
        candidate=trial.candidate,
        engine_version=study.engine_version,
        gpu_class=study.gpu_class,
        study_id=study.id,
        trial_id=trial.id,
        argv=argv,
        env=env,
        evidence={**_facts(store, study, trial), **evidence},
        now=now,
    )
    if alias is not None:
        gates = NO_GATES if alias in (CHALLENGER, BASELINE) else Gates(engine_version=study.engine_version)
        promote(store, profile, alias, gates=gates, actor=actor, reason=reason, now=now)
    return profile


def _facts(store: Store, study: Study, trial: Trial) -> dict[str, JSON]:
    measured = trial.measurement
    driver = next((node.driver for node in store.nodes() if node.name == study.node), None)
    facts: dict[str, JSON] = {
        "study_name": study.name,
        "trace_digest": study.trace_digest,
        "space_digest": study.space_digest,
        "slices": [each.name for each in study.slices],
        "objectives": list(study.objectives),
        "trial_number": trial.number,
        "trial_attempt": trial.attempt,
        "origin": trial.origin,
        "driver": driver,
        "fidelity_failed": list(measured.fidelity.failed) if measured else [],
        "values": {},
    }
    if measured:
        facts["values"] = pack_values(measured.values)
    return facts


def same_engine(one: str, other: str) -> bool:
    """Whether two engine versions are the same release; a local part (`+cpu`, `+cu129`) does not count."""
    try:
        return Version(one).public == Version(other).public
    except InvalidVersion:
        return one == other


def gate_failures(profile: Profile, gates: Gates, *, now: datetime) -> tuple[str, ...]:
    """One clause per check that the version does not pass."""
    failed: list[str] = []
    if gates.confirmed and profile.evidence.get("confirmed") is not True:
        shown = profile.evidence.get("demonstration") is True
        why = " (it is a demonstration, so do not act on its numbers)" if shown else ""
        failed.append(f"its gain over the baseline was not confirmed{why}")
    if gates.slo_met and profile.evidence.get("slo_met") is not True:
        failed.append("it did not meet the SLO")
    if gates.judged and profile.evidence.get("quality") != "off" and (turned := unjudged(profile)):
        failed.append(f"its answers were not judged, although it changes {', '.join(turned)}")
    if gates.not_worse:
        failed += _too_much_worse(profile.evidence)
    if gates.engine_version is not None and not same_engine(gates.engine_version, profile.engine_version):
        failed.append(f"it was measured on engine {profile.engine_version}, not {gates.engine_version}")
    if gates.max_age is not None and now - profile.created_at > gates.max_age:
        failed.append(f"it is older than {many(gates.max_age.days, 'day')}")
    return tuple(failed)


def unjudged(profile: Profile) -> tuple[str, ...]:
    """The knobs of a version that change the output, if its answers were not judged. A version of an older
    release that does not say so counts as not judged.
    """
    said = profile.evidence.get("unjudged")
    if isinstance(said, list):
        return tuple(str(name) for name in said)
    values = profile.evidence.get("values")
    judged = isinstance(values, dict) and "token_agreement" in values
    if judged or profile.evidence.get("origin") == "baseline":
        return ()
    return tuple(n for n in profile.candidate if n in CATALOGUE and CATALOGUE[n].changes_output)


def _too_much_worse(evidence: Mapping[str, JSON]) -> list[str]:
    """One clause per change that is worse than `not_worse` allows, on the held-out slice too."""
    limits, changes, found = evidence.get("not_worse"), evidence.get("changes"), list[str]()
    if not isinstance(changes, list) or not isinstance(limits, dict):
        return []
    for row in (each for each in changes if isinstance(each, dict)):
        metric, change = str(row.get("metric")), row.get("change")
        limit = limits.get(metric)
        if not isinstance(limit, int | float) or not isinstance(change, int | float):
            continue
        if (-change if is_maximized(metric) else change) > limit:
            where = " on the held-out slice" if row.get("where") == "held_out" else ""
            found.append(f"its {metric} is {change:+.0%}{where}, worse than the {limit:.0%} of not_worse")
    return found


def promote(
    store: Store,
    profile: Profile,
    alias: str = CHAMPION,
    *,
    gates: Gates | None = None,
    expected: int | None = None,
    actor: str,
    reason: str,
    now: datetime,
) -> AliasEvent:
    """Moves an alias to a version by compare-and-set (`expected`: the generation seen, 0 = never set).

    Raises Conflict naming every gate that failed, or when the alias is frozen or was moved in between. An
    alias that points there already is left alone. The reason says what was not judged. A version that a
    virtual clock made later than `now` is not promoted before that.
    """
    gates = gates if gates is not None else Gates()
    if failed := gate_failures(profile, gates, now=now):
        raise Conflict(f"version {profile.version} cannot become '{alias}': {'; '.join(failed)}")
    if turned := unjudged(profile):
        reason = f"{reason} (its answers were not judged: {', '.join(turned)})"
    seen = store.alias(profile.key, alias)
    if expected is None and seen is not None and seen.to_version == profile.version:
        return seen
    return store.move_alias(
        profile.key, alias, profile.version, expected=expected, actor=actor, reason=reason,
        now=max(now, profile.created_at),
    )  # fmt: skip


def trail(events: Sequence[AliasEvent]) -> tuple[int, ...]:
    """The versions that an alias stands on, oldest first: going back to one forgets those after it."""
    versions: list[int] = []
    for event in events:
        if event.to_version is None:
            continue
        if event.to_version in versions:
            del versions[versions.index(event.to_version) + 1 :]
        else:
            versions.append(event.to_version)
    return tuple(versions)


def rollback(
    store: Store,
    key: ProfileKey,
    alias: str = CHAMPION,
    *,
    actor: str,
    reason: str,
    now: datetime,
    expected: int | None = None,
) -> AliasEvent:
    """Moves an alias back to its version before, without checks; a second rollback goes one version
    further.
    """
    event = _event(store, key, alias)
    before = trail(store.alias_events(key, alias=alias))
    if len(before) < 2:
        raise Conflict(f"alias '{alias}' has no version before {event.to_version} to go back to")
    seen = event.generation if expected is None else expected
    return store.move_alias(
        key, alias, before[-2], expected=seen, actor=actor, reason=f"rollback: {reason}", now=now
    )


def _event(store: Store, key: ProfileKey, alias: str) -> AliasEvent:
    event = store.alias(key, alias)
    if event is not None and event.to_version is not None:
        return event
    known = sorted(each.alias for each in store.aliases(key))
    there = f"; it has {', '.join(known)}" if known else ""
    of = f"{key.model} on {key.target} for {key.workload}"
    raise NotFound(f"there is no '{alias}' profile of {of}{nearest(alias, known)}{there}")


def workloads(store: Store, model: str) -> tuple[str, ...]:
    """The workloads that a model has profiles for. NotFound names the nearest model."""
    found = sorted({key.workload for key in store.profile_keys(model)})
    if not found:
        models = {key.model for key in store.profile_keys()}
        raise NotFound(f"there is no profile of model '{model}'{nearest(model, models)}")
    return tuple(found)


def only_workload(store: Store, model: str, *, asked_by: str) -> str:
    """The one workload that a model has profiles for. BadInput, which names `asked_by`, if it has more."""
    found = workloads(store, model)
    if len(found) > 1:
        raise BadInput(f"{asked_by} is needed: the model has profiles for {', '.join(found)}")
    return found[0]


def resolve(
    store: Store,
    *,
    model: str,
    workload: str,
    node: str | None = None,
    gpu_class: str | None = None,
    alias: str = CHAMPION,
    engine_version: str | None = None,
) -> Resolved:
    """The profile that an alias names for a node, or, only when `gpu_class` is given, for a GPU class.

    The profile of the node comes first. NotFound: there is none. Conflict: there is one, but for another
    engine version or another GPU.
    """
    event, matched = _find(store, model=model, workload=workload, node=node, gpu_class=gpu_class, alias=alias)
    if event.to_version is None:
        raise NotFound(f"alias '{alias}' was removed")
    profile = store.profile_version(event.key, event.to_version)
    if engine_version is not None and not same_engine(engine_version, profile.engine_version):
        raise Conflict(
            f"the '{alias}' profile (version {profile.version}) is for engine {profile.engine_version},"
            f" not {engine_version}: tune on that engine first"
        )
    wanted = gpu_class or next((each.gpu_class for each in store.nodes() if each.name == node), None)
    if wanted is not None and wanted != profile.gpu_class:
        raise Conflict(
            f"the '{alias}' profile (version {profile.version}) is for GPU class {profile.gpu_class},"
            f" not {wanted}: tune on that class first"
        )
    return Resolved(profile=profile, event=event, matched=matched)


def _find(
    store: Store, *, model: str, workload: str, node: str | None, gpu_class: str | None, alias: str
) -> tuple[AliasEvent, Literal["node", "class"]]:
    targets: list[tuple[str | None, Literal["node", "class"]]] = [(node, "node"), (gpu_class, "class")]
    asked = [(target, matched) for target, matched in targets if target]
    if not asked:
        raise BadInput("give a node or a GPU class (HTTP: node or gpu_class)")
    refused = NotFound("")
    for target, matched in asked:
        try:
            key = ProfileKey(model=model, target=target, workload=workload)
            return _event(store, key, alias), matched
        except NotFound as error:
            refused = error
    raise refused


def stale_reasons(
    profile: Profile,
    *,
    node: Node | None = None,
    engine_version: str | None = None,
    trace_digest: str | None = None,
    model_revision: str | None = None,
) -> tuple[str, ...]:
    """What has changed since a version was measured, one clause each. None means not known, so not
    changed.
    """
    told = profile.evidence
    reasons: list[str] = []
    if engine_version is not None and not same_engine(engine_version, profile.engine_version):
        reasons.append(f"engine {profile.engine_version} → {engine_version}")
    if node is not None and node.gpu_class != profile.gpu_class:
        reasons.append(f"GPU {profile.gpu_class} → {node.gpu_class}")
    if node is not None and node.driver and told.get("driver") and node.driver != told["driver"]:
        reasons.append(f"driver {told['driver']} → {node.driver}")
    if trace_digest is not None and told.get("trace_digest") not in (None, trace_digest):
        reasons.append("traffic: another trace")
    if model_revision is not None and told.get("model_revision") not in (None, model_revision):
        reasons.append(f"model revision {told['model_revision']} → {model_revision}")
    return tuple(reasons)


LOOKED_BACK = 20
"""How many earlier versions are compared with one."""


def serves_as(store: Store, profile: Profile) -> int | None:
    """The last earlier version of its key that serves the same; None if none of the newest does."""
    earlier = store.profiles(profile.key, after=profile.id, limit=LOOKED_BACK)
    return next((each.version for each in earlier if serve_the_same(each, profile)), None)


def serve_the_same(one: Profile, other: Profile) -> bool:
    """Whether engine, GPU class, command line and environment are the same; the evidence may differ."""
    served = attrgetter("engine_version", "gpu_class", "candidate", "argv", "env")
    return bool(served(one) == served(other))


def diff(before: Profile, after: Profile) -> tuple[Change, ...]:
    """What differs between two versions: engine, traffic, GPU class, knobs, fixed arguments, environment."""
    return changes(_configuration(before), _configuration(after))


def _configuration(profile: Profile) -> Configuration:
    """A version as one configuration. Arguments that a knob already covers are left out."""
    knobs = {flag.removeprefix("--") for name in profile.candidate for flag in CATALOGUE[name].flags}
    knobs |= PREEMPTION_FLAGS if "preemption" in profile.candidate else set()
    arguments = {
        flag.name: " ".join(flag.words)
        for flag in split_flags(profile.argv)
        if flag.name.removeprefix("no-") not in knobs and flag.name not in knobs
    }
    return Configuration(
        engine_version=profile.engine_version,
        trace_digest=str(profile.evidence.get("trace_digest") or ""),
        gpu_class=profile.gpu_class,
        candidate=profile.candidate,
        arguments=arguments,
        environment=profile.env,
    )
