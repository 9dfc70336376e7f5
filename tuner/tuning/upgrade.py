"""Whether a new version of the engine serves a configuration as well as the old one, and if not, why."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from tuner.conclusions import Arm, Conclusion, LostKnob, MovedDefault, UpgradeFinding
from tuner.engine.metrics import same_value
from tuner.errors import BadInput
from tuner.history.store import Store
from tuner.knobs.arguments import refusal, takes
from tuner.knobs.baseline import GONE
from tuner.knobs.catalogue import CATALOGUE
from tuner.records import JSON, Candidate, EngineFacts, Run, RunState, Trial
from tuner.search.trial_view import DERIVED
from tuner.tuning.comparison import (
    MARGIN,
    ROUNDS,
    ArmConfiguration,
    Comparing,
    compared,
    named_configuration,
    on_engine,
    undecided,
    with_configuration,
)
from tuner.tuning.context import RunContext
from tuner.tuning.study import ComparedArm, Prepared
from tuner.tuning.survey import Argument, EngineFile

OLD, NEW, PINNED = "old version", "new version", "new version with the old defaults"

# A pinned arm that has undone this share of what the new version lost shows that the default did it.
UNDONE = 0.5

# Two defaults at most are also pinned one by one: more arms would make every one of them less sure.
ONE_BY_ONE = 2


class NothingNew(BadInput):
    """There is no other version to check, or it was checked before."""


def upgrade_check(
    prepared: Prepared,
    store: Store | None,
    *,
    old: str,
    new: str,
    configuration: str,
    base: Path,
    rounds: int = ROUNDS,
    margin: float,
    engines: Mapping[str, EngineFile] | None = None,
    files: bool = True,
) -> Prepared:
    """The comparison of one configuration (an alias, a profile's id, a file, `today`) on two versions.
    `old` and `new` are engines as in `arm_of`. An empty `old` is the study's own engine.

    BadInput or NotFound says what to mend, also if the two are the same engine.
    """
    before = on_engine(prepared, old, base=base, engines=engines, files=files) if old else prepared
    after = on_engine(prepared, new, base=base, engines=engines, files=files)
    if (before.command, before.file.engine.env) == (after.command, after.file.engine.env):
        raise NothingNew(f"--from and --to name the same engine ({before.facts.version})")
    asked = named_configuration(configuration, prepared, store, base, files)
    fitting, lost = fitted(asked, prepared.file.engine.args, before.facts, after.facts)
    engine = after.file.engine.model_copy(update={"args": {}})
    after = replace(after, file=after.file.model_copy(update={"engine": engine}))
    arms = [
        ComparedArm(name=OLD, candidate=asked.candidate, prepared=with_configuration(before, asked, OLD)),
        ComparedArm(name=NEW, candidate=fitting.candidate, prepared=with_configuration(after, fitting, NEW)),
    ]
    found = UpgradeFinding(
        old=before.facts.version, new=after.facts.version, configuration=configuration, compiles=not lost,
        lost=lost,
    )  # fmt: skip
    return compared(arms, rounds=rounds, margin=margin, upgrade=found)


def unchecked(
    prepared: Prepared,
    store: Store,
    engines: Mapping[str, EngineFile],
    *,
    new: str,
    old: str,
    configuration: str,
    files: bool,
) -> Prepared:
    """The upgrade check of a study as a schedule begins it. NothingNew if both versions are the same, or if
    the same configuration was already checked on both, on any traffic, and no difference stayed open.
    """
    check = upgrade_check(
        prepared, store, old=old, new=new, configuration=configuration, base=Path(), margin=MARGIN,
        engines=engines, files=files,
    )  # fmt: skip
    ours = check.study
    for study in store.studies(node=ours.node, model=ours.model):
        if (study.name, study.spec.get("arms")) != (ours.name, ours.spec["arms"]):
            continue
        for run in store.runs(study.id, state=RunState.FINISHED):
            found = run.summary.get("upgrade")
            if isinstance(found, dict) and found.get("fault") != "open":
                when = f"{run.started_at:%Y-%m-%d}"
                raise NothingNew(f"{found['new']} was checked on {when} already: {found['advice']}")
    return check


def fitted(
    asked: ArmConfiguration, always: Mapping[str, Argument], old: EngineFacts, new: EngineFacts
) -> tuple[ArmConfiguration, tuple[LostKnob, ...]]:
    """(the configuration as the new version takes it, what it does not take as it is written). `always` are
    the study's own arguments.
    """
    lost, knobs = list[LostKnob](), dict(asked.candidate)
    args: dict[str, Argument] = {
        k.lstrip("-").replace("_", "-"): v for k, v in {**always, **asked.args}.items()
    }
    for name, value in asked.candidate.items():
        why = refusal(name, value, new)
        if why is None:
            continue
        del knobs[name]
        flag = CATALOGUE[name].flag_in(old)
        successor = successor_of(flag, old, new) if flag else None
        if successor is not None:
            args[successor[2:]], why = value, f"{flag} is now {successor}"
        lost.append(LostKnob(name=name, value=value, successor=successor, why=why))
    for name, given in list(args.items()):
        flag = f"--{name}"
        if flag in new.flags:
            continue
        del args[name]
        successor = successor_of(flag, old, new)
        why = f"the new version does not take {flag}"
        if successor is not None:
            args[successor[2:]], why = given, f"{flag} is now {successor}"
        shown = given if isinstance(given, str | int | float | bool) else str(given)
        lost.append(LostKnob(name=name, value=shown, successor=successor, why=why))
    return ArmConfiguration(candidate=Candidate(knobs), args=args, env=asked.env), tuple(lost)


def successor_of(flag: str, old: EngineFacts, new: EngineFacts) -> str | None:
    """The new version's flag in place of one that it lost: another of the knob's own names. If there is
    none, the flag that only the new version has and whose name is nearest.
    """
    own = [f for entry in CATALOGUE.values() if flag in entry.flags for f in entry.flags if f in new.flags]
    if own:
        return own[0]
    added = sorted(f for f in new.flags - old.flags if not f.startswith("--no-"))
    return next(iter(get_close_matches(flag, added, n=1, cutoff=0.6)), None)


def moved_defaults(old: Prepared, new: Prepared, before: Trial, after: Trial) -> tuple[MovedDefault, ...]:
    """The knobs that the configuration leaves open and that the two engines run differently: by what both
    reported, else by what their interpreters said.
    """
    found = []
    for name in CATALOGUE:
        if name in before.candidate or name in after.candidate or name in DERIVED:
            continue
        pair = [t.effective.get(name, p.facts.defaults.get(name)) for t, p in ((before, old), (after, new))]
        told = [name in t.effective for t in (before, after)]
        if told[0] == told[1] and not same_value(*pair) and pair != [None, None]:
            found.append(MovedDefault(name=name, before=pair[0], after=pair[1]))
    return tuple(found)


class Upgrading(Comparing):
    """The run of an upgrade check: the old version, the new one, and the new one with every default pinned
    that changed. The new version is settled once anything is clearly worse; the pinned arms matter only then.
    """

    decided = "another round cannot change the advice"

    def __init__(self, context: RunContext, run: Run) -> None:
        super().__init__(context, run)
        assert self._comparison.upgrade is not None
        self._finding = self._comparison.upgrade
        self._pins: list[tuple[str, ...]] = []

    async def enter(self) -> None:
        """Both versions, then the pinned arms, which only their engines' own words tell."""
        await super().enter()
        old, new = self._comparison.arms
        before, after = self._arms()
        if not (before.effective and after.effective):
            return
        moved = moved_defaults(old.prepared, new.prepared, before, after)
        self._finding = replace(self._finding, moved=moved)
        pins = {
            m.name: m.before
            for m in moved
            if m.before is not None and takes(m.name, m.before, new.prepared.facts)
        }
        groups = [tuple(pins)] if pins else []
        if 1 < len(pins) <= ONE_BY_ONE:
            groups += [(name,) for name in pins]
        for names in groups:
            label = PINNED if len(names) == len(pins) else f"{NEW} with {names[0]}={pins[names[0]]}"
            candidate = Candidate({**new.candidate, **{name: pins[name] for name in names}})
            arm = replace(new, name=label, candidate=candidate,
                          prepared=replace(new.prepared, baseline=candidate))  # fmt: skip
            self._pins.append(names)
            await self._enter(arm)

    def wanted(self, arms: Sequence[Arm], unsure: Sequence[tuple[int, str]]) -> set[int]:
        """The new version while nothing is clearly worse; then the pinned arms, in what is worse."""
        new, *pinned = arms
        worse = worse_of(new)
        if not worse and new.dropped is None:
            return {trial for trial, _ in unsure if trial == new.trial}
        left = {trial for trial, metric in unsure if metric in worse or new.dropped is not None}
        return {arm.trial for arm in pinned if arm.trial in left}

    def _named(self, arm: Arm) -> Arm:
        return without_renamed(super()._named(arm), self._finding.lost)

    def conclusion(self, why: str | None) -> Conclusion | None:
        """The comparison's, with the advice in its sentence."""
        said = super().conclusion(why)
        if said is None:
            return None
        self._finding = finding_of(self._finding, said, self._pins, self._margin)
        sentence = f"{self._finding.sentence} {said.sentence}"
        return replace(said, advice=self._finding.advice, sentence=sentence)

    def summary(self, said: Conclusion | None) -> dict[str, JSON]:
        """What every comparison's summary has, and the finding."""
        return {**super().summary(said), "upgrade": self._finding.to_json()}


def without_renamed(arm: Arm, lost: Sequence[LostKnob]) -> Arm:
    """An arm that does not differ in a knob that it only sets under another name."""
    same = {knob.name for knob in lost if knob.successor is not None}
    differs = {name: pair for name, pair in arm.changed.items() if name not in same or pair[1] is not None}
    return replace(arm, changed=differs)


def worse_of(arm: Arm) -> tuple[str, ...]:
    """The measurements in which an arm is clearly worse than the first one."""
    return tuple(c.metric for c in arm.changes if c.word == "worse")


def finding_of(
    finding: UpgradeFinding, said: Conclusion, pins: Sequence[tuple[str, ...]], margin: float
) -> UpgradeFinding:
    """The finding with cause, advice and sentence, by what was measured."""
    new, *arms = said.finalists or (None,)
    tried = dict(zip(pins, arms, strict=False))
    if new is None or new.dropped is not None or not said.measured_again:
        return _not_served(finding, new.dropped if new is not None and new.dropped else said.sentence, tried)
    worse = worse_of(new)
    if not worse:
        is_open = any(True for _ in undecided([new], margin))
        found = replace(
            finding, fault="open" if is_open else "none",
            advice="measure longer" if is_open else "re-tune" if _left_out(finding) else "move",
        )  # fmt: skip
        return _told(found, f"Nothing is clearly worse on {finding.new} than on {finding.old}.")
    undone = {names: _undone(new, arm, worse) for names, arm in tried.items()}
    moved = _judged(finding, {names: share > UNDONE for names, share in undone.items()})
    found = replace(finding, worse=worse, moved=moved, fault="code", advice="stay")
    if pins and undone.get(pins[0], 0.0) > UNDONE:
        still = worse_of(tried[pins[0]])
        found = replace(found, fault="both" if still else "default", advice="move with these pins")
    return _told(found, f"{finding.new} is worse than {finding.old} in {', '.join(worse)}.")


def _not_served(finding: UpgradeFinding, why: str, tried: Mapping[tuple[str, ...], Arm]) -> UpgradeFinding:
    """The finding where the new version did not serve the traffic as it is."""
    served = {names: bool(arm.changes) for names, arm in tried.items()}
    if any(served.values()):
        moved = _judged(finding, served)
        found = replace(finding, moved=moved, fault="default", advice="move with these pins")
        return _told(found, f"The new version does not serve with its new defaults:  {why.rstrip('.')}.")
    found = replace(finding, fault="start", advice="re-tune" if _left_out(finding) else "stay")
    return _told(found, f"The new version does not serve: {why.rstrip('.')}.")


def _left_out(finding: UpgradeFinding) -> bool:
    return any(knob.successor is None for knob in finding.lost)


def _judged(finding: UpgradeFinding, undone: Mapping[tuple[str, ...], bool]) -> tuple[MovedDefault, ...]:
    """The defaults that changed, each with whether its old value alone undoes what is worse."""
    single = {names[0]: found for names, found in undone.items() if len(names) == 1}
    return tuple(replace(m, guilty=single.get(m.name)) for m in finding.moved)


def _undone(new: Arm, pinned: Arm, worse: Sequence[str]) -> float:
    """The share of the loss that is gone with the old default, over all that is worse; 0 if the pinned
    engine did not serve.
    """
    shares = []
    for metric in worse:
        lost, left = new.change(metric), pinned.change(metric)
        if lost is None or left is None or not lost.change or left.change is None:
            return 0.0
        shares.append(1.0 - left.change / lost.change)
    return sum(shares) / len(shares) if shares else 0.0


def _told(finding: UpgradeFinding, first: str) -> UpgradeFinding:
    guilty = [m for m in finding.moved if m.guilty] or list(finding.moved)
    pins = ", ".join(f"{m.name}={m.before} (now {m.after})" for m in guilty)
    causes = {
        "code": "The code is the cause: with the old defaults, the new version is just as slow.",
        "default": f"The cause is a default that changed: {pins}.",
        "both": f"A default that changed is one part of the cause: {pins}. The code is the other part.",
    }
    if finding.fault == "code" and not finding.moved:
        causes["code"] = "The code is the cause: this configuration uses no default that has changed."
    elif finding.fault == "code" and all(m.before is None for m in finding.moved):
        causes["code"] = f"The cause is the code, or a default that cannot be pinned: {pins}."
    parts = [f"Advice: {finding.advice}.", first, causes.get(finding.fault, ""), *map(_lost, finding.lost)]
    return replace(finding, sentence=" ".join(part for part in parts if part))


def _lost(knob: LostKnob) -> str:
    if knob.successor is not None:
        return f"{knob.name} is now {knob.successor}."
    became = GONE.get(f"--{knob.name.replace('_', '-')}")
    return f"{knob.name} is gone{f' ({became})' if became else ''}: it was left out."
