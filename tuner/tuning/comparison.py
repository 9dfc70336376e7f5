"""Two to five configurations compared fairly: the arms as people write them (what runs, and on which engine),
and a run whose trials are the arms.
"""

import glob
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner import masking
from tuner.adapters import adapter_of
from tuner.conclusions import Arm, Conclusion, Difference, Judgement, UpgradeFinding
from tuner.errors import Aborted, BadInput, NotFound, StudyFailed, nearest
from tuner.history.store import Store
from tuner.knobs import manifests
from tuner.knobs.arguments import compile_candidate, fixed
from tuner.knobs.baseline import from_arguments
from tuner.measures import many
from tuner.records import JSON, Candidate, Profile, ProfileKey, Run, Trial, TrialState, digest_of
from tuner.report.words import configuration, difference
from tuner.simulator.options import read_release
from tuner.tuning.attempt import MeasureOptions, perform
from tuner.tuning.concluding import (
    LEVEL,
    Repeats,
    arms_of,
    conclude,
    noise_before,
    spreads_of,
    unmeasured,
)
from tuner.tuning.confirm import ENDS, LEAST_ROUNDS, Rounds, asked_of, cost_of, folder_of, label_of
from tuner.tuning.context import ABORTED_RETRIES, RunContext
from tuner.tuning.ending import summary_of_conclusion
from tuner.tuning.execution import Execution
from tuner.tuning.next_trial import next_number
from tuner.tuning.significance import LEAST
from tuner.tuning.study import ComparedArm, ComparisonPlan, Prepared
from tuner.tuning.survey import Argument, EngineFile, flag_name, survey

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
    import` reads, or a command line. ENGINE is an interpreter, an image (if the study's engine.command
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
    """The study with an arm's own arguments. UnsupportedKnob or BadInput if its engine refuses them."""
    engine = prepared.file.engine
    turned = {flag_name(k) for k in found.candidate}  # a knob of the arm is written once, by the candidate
    args = {flag_name(k)[2:]: v for k, v in engine.args.items() if flag_name(k) not in turned}
    args |= {flag_name(k)[2:]: v for k, v in found.args.items()}
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
        read = manifests.read(str(base / what) if os.path.isfile(base / what) else what)
        return ArmConfiguration(candidate=read.candidate, args=dict(read.args), env=read.env)
    # A profile's knobs, and the arguments and variables that its study fixed.
    profile = profile_of(what, prepared, store, files=files)
    imported = from_arguments(profile.argv, env=profile.env, source=f"profile {profile.id}")
    candidate = Candidate({**imported.candidate, **profile.candidate})
    return ArmConfiguration(candidate=candidate, args=dict(imported.args), env=imported.env)


def profile_of(what: str, prepared: Prepared, store: Store | None, *, files: bool = True) -> Profile:
    """The profile of an id or alias. NotFound names the nearest alias of the study's key; BadInput if it
    is of another model.
    """
    if store is None:
        raise NotFound(f"there is no history yet, so there is no profile '{what}'")
    if what.isdigit():
        profile = store.profile(int(what))
        if profile.key.model != prepared.study.model:
            raise BadInput(
                f"profile {what} is for model {profile.key.model}, but the study is for "
                f"{prepared.study.model}"
            )
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
        f"'{what}' is not an alias of {study.model} on {study.node} for {study.workload}"
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
    found, section = survey(file, base=base), prepared.study.identity.get("engine")
    identity: dict[str, JSON] = {
        **prepared.study.identity,
        "engine": {
            **(section if isinstance(section, dict) else {}), "kind": file.kind,
            "version": found.facts.version, "platform": found.facts.platform,
            "command": list(masking.arguments(file.command)),
            "env": dict(masking.environment(file.env)),
        },
    }  # fmt: skip
    return replace(
        prepared, file=prepared.file.model_copy(update={"engine": file}), facts=found.facts,
        command=found.command, study=replace(prepared.study, identity=identity),
    )  # fmt: skip


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
            raise BadInput(
                f"no file {path}: name a file with a release of the simulated engine (docs/compare.md)"
            )
        return engine.model_copy(update={"env": {**engine.env, **read_release(path).environment()}})
    if path.is_file() or shutil.which(text):
        python = str(path) if path.is_file() else str(shutil.which(text))
        return engine.model_copy(update={"python": python, "command": (), "stop_command": ()})
    if engine.command and not engine.command[-1].startswith(("-", "{")):
        return engine.model_copy(update={"command": (*engine.command[:-1], text)})
    raise BadInput(
        f"'{text}' is no interpreter: there is no file {path}. If '{text}' is an image, the last word of"
        " engine.command in the study must be an image"
    )


MOST_ARMS = 5

# Origin of the trials that are not the first arm.
ARM = "compared"

# How often each arm is launched at most, and the share that a difference is to exceed, unless it is said.
ROUNDS, MARGIN = 6, 0.10


def compared(
    arms: Sequence[ComparedArm], *, rounds: int = ROUNDS, margin: float, upgrade: UpgradeFinding | None = None
) -> Prepared:
    """The comparison of some arms of one study, as a study of its own: it has the study's trace, slices, SLO
    and objectives, and the first arm's engine. Nothing was chosen before, so no slice is held out.

    BadInput for fewer than two arms or more than five, or two of one name.
    """
    if not 2 <= len(arms) <= MOST_ARMS:
        raise BadInput(f"a comparison has two to {MOST_ARMS} arms, not {len(arms)}")
    names = [arm.name for arm in arms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"two arms have the name '{twice}'; give one of them another name, such as b=WHAT")
    if rounds < LEAST_ROUNDS:
        raise BadInput(
            f"a comparison needs at least {LEAST_ROUNDS} rounds: one round does not show the noise"
        )
    first, kind = arms[0].prepared, "compare" if upgrade is None else "upgrade"
    told: list[JSON] = [_told(arm) for arm in arms]
    slices = first.study.searched_slices
    identity: dict[str, JSON] = {
        **first.study.identity, "compare": {"kind": kind, "arms": told},
        "slices": [[s.name, s.start_s, s.duration_s, s.held_out] for s in slices],
    }  # fmt: skip
    study = replace(
        first.study, id=digest_of(identity), name=f"{first.file.name}-{kind}"[:100], identity=identity,
        slices=slices, engine_version=first.facts.version, spec={**first.study.spec, "arms": told},
    )  # fmt: skip
    plan = replace(first.plan, repeats=LEAST_ROUNDS, most_repeats=rounds)
    placed = tuple(
        replace(
            arm,
            prepared=replace(
                arm.prepared,
                study=replace(study, identity={**identity, "engine": _engine_of(arm)}),
                plan=plan,
                baseline=arm.candidate,
            ),
        )
        for arm in arms
    )
    comparison = ComparisonPlan(arms=placed, rounds=rounds, margin=margin, upgrade=upgrade)
    return replace(placed[0].prepared, comparison=comparison)


def _told(arm: ComparedArm) -> JSON:
    """What makes an arm what it is; secrets are masked as in every study."""
    return {
        "name": arm.name, "candidate": dict(arm.candidate), "engine": _engine_of(arm),
        "fixed": list(arm.prepared.fixed),
    }  # fmt: skip


def _engine_of(arm: ComparedArm) -> JSON:
    """The engine of an arm, with the environment of its own configuration."""
    section = arm.prepared.study.identity["engine"]
    assert isinstance(section, dict)
    return {**section, "env": dict(masking.environment(arm.prepared.file.engine.env))}


def undecided(arms: Sequence[Arm], margin: float) -> Iterator[tuple[Arm, Difference]]:
    """The differences of which it is open whether they are clear or smaller than the margin."""
    for arm in arms:
        for each in arm.changes:
            if each.word == "open" and _may_exceed(each, margin):
                yield arm, each


def _may_exceed(each: Difference, margin: float) -> bool:
    return each.within is None or each.within >= margin


def tells_more(each: Difference, reach: float, margin: float) -> bool:
    """Whether further launches may tell more of a difference that is not clear; `reach` is half the width of
    its interval by the noise between launches.

    Where that is small already it is the requests that differ too much. What is smaller than the margin is
    measured on while it leans: while one side is so much likelier that it may become clear.
    """
    if (within := each.within) is None or _may_exceed(each, margin):
        return reach > margin / 2
    size = abs(each.change or 0.0)
    return max(LEAST, within / 2) < size < reach


KNOWN = "every difference is known"


class Comparing(Execution):
    """The run of a comparison. Each arm's first launch is its trial, and the first round.

    From the second round on, it looks at its answer after every round. Each look gets an equal part of two
    error probabilities of 5 %: that equal arms are called different (`WinnerCriteria.family`: Bonferroni
    over arms, objectives and looks, the simplest alpha spending), and that arms are called the same
    although they differ by more than the margin (`significance.sameness`). Student's interval of each look
    is exact at the two to eight launches that there are, so the answer is valid however often it was looked
    at. A confidence sequence would be valid for any number of looks, but it is wider for so few.
    """

    decided = ENDS["decided"]
    """Why it ends although a difference is open and a limit is not reached."""

    def __init__(self, context: RunContext, run: Run) -> None:
        super().__init__(context, run)
        assert context.prepared.comparison is not None
        self._comparison = context.prepared.comparison
        self._label = label_of(run.id)
        self._asked = asked_of(context.prepared)
        self._earlier = noise_before(context.store, self._asked, without=self._label)
        self._ended = ""
        self._first = next_number([t for t in self._trials() if t.run_id != run.id])
        self._placed = list[ComparedArm]()
        self._rounds = Rounds(context=context, run=run, label=self._label, dropped={}, what="comparison")

    async def work(self) -> tuple[str, str | None]:
        """Launch every arm once, then all in turns."""
        await self.enter()
        if len(self._served()) < 2:
            return f"there is nothing to compare with: {self._failures()}", None
        rounds, most = self._rounds, self._comparison.rounds
        end = await self._guarded(
            rounds.measure(self._arms(), least=LEAST_ROUNDS, most=most, left=self._left)
        )
        known = end == "decided" and not any(undecided(self._seen()[0], self._margin))
        words = KNOWN if known else self.decided if end == "decided" else ENDS[end]
        self._ended = words.format(rounds=self._rounds.done(self._served()))
        return self._ended, None

    async def enter(self) -> None:
        """Launch every arm once."""
        for arm in self._comparison.arms:
            await self._enter(arm)

    async def _enter(self, arm: ComparedArm) -> Trial:
        """One more arm. Its trial is its first launch."""
        place = len(self._placed)
        self._placed.append(arm)
        self._rounds.setups[self._first + place] = arm.prepared
        await self._guarded(self._launched(place))
        return self._arms()[place]

    async def _launched(self, place: int) -> None:
        """The first launch of an arm. A failure of its own drops it; the first arm's ends the run where
        nothing can mend it.
        """
        arm, number = self._placed[place], self._first + place
        context = replace(self._context, prepared=arm.prepared)
        while True:
            earlier = [t for t in self._trials() if t.number == number]
            if earlier and earlier[-1].state is not TrialState.ABORTED:
                break
            if len(earlier) > ABORTED_RETRIES:
                raise Aborted(f"{arm.name}: {earlier[-1].reason}", cause=earlier[-1].cause or "aborted")
            trial = self._context.store.start_trial(
                study_id=self._context.prepared.study.id, run_id=self._run.id, candidate=arm.candidate,
                number=number, attempt=len(earlier), seed=0, origin=ARM if place else "baseline",
                now=self._context.clock(), directory=None,
            )  # fmt: skip
            asked = configuration(trial, self._context.prepared.study, self._trials())
            self._tell("started", arm.name, replace(trial, candidate=asked))
            how = MeasureOptions(folder=folder_of(self._label, 1, trial.attempt))
            try:
                done = await perform(context, trial, earlier, how)
            except StudyFailed as error:
                if place == 0:
                    raise
                self._rounds.drop(self._arms()[place], f"it does not start: {error}")
                return
            self._tell("finished", done.reason or "", done)
            if done.state is TrialState.COMPLETE and done.measurement is not None:
                again = replace(done.measurement, purpose="confirm", repeat=1)
                self._context.store.add_measurement(done.id, again)
        if (last := self._arms()[place]).state is not TrialState.COMPLETE:
            self._rounds.drop(last, last.reason or "it did not serve the traffic")

    @property
    def _stage(self) -> tuple[str, int]:
        """The first launch of each arm counts as the comparison's, like all others."""
        return self._rounds.what, LEAST_ROUNDS * max(len(self._placed), len(self._comparison.arms))

    def _arms(self) -> list[Trial]:
        """The trials of the arms so far, each its last attempt."""
        latest = {t.number: t for t in self._trials() if t.run_id == self._run.id}
        return [latest[number] for number in sorted(latest)]

    def _served(self) -> list[Trial]:
        return [t for t in self._arms() if t.number not in self._rounds.dropped]

    def _found(self) -> Repeats:
        """What was measured so far; without first measurements, as nothing can drift between arms that are
        launched in turns.
        """
        base, *others = (replace(trial, measurements=()) for trial in self._arms())
        measured, dropped = self._rounds.measured(self._arms())
        return Repeats(base=base, finalists=others, measured=measured, dropped=dropped, earlier=self._earlier)

    def _left(self) -> list[Trial]:
        """The arms that another round may tell more of, and the first one; none if it would not."""
        arms, unsure = self._seen()
        wanted = self.wanted(arms, unsure)
        return [t for t in self._arms() if t.number in wanted or (wanted and t.number == self._first)]

    def wanted(self, arms: Sequence[Arm], unsure: Sequence[tuple[int, str]]) -> set[int]:
        """The trial numbers of the arms to be launched again. `unsure` holds (trial number, metric) of what
        further launches may tell.
        """
        return {trial for trial, _ in unsure}

    def _seen(self) -> tuple[list[Arm], list[tuple[int, str]]]:
        """(the arms by what was measured so far, what further launches may tell of them)."""
        found = self._found()
        spreads = spreads_of(self._asked, found)
        _, arms = arms_of(self._asked, found, spreads)
        alpha = (1 - LEVEL) / self._asked.family(len(arms))
        unsure = [
            (arm.trial, each.metric)
            for arm in arms
            for each in arm.changes
            if each.word == "open"
            and tells_more(each, spreads[each.metric, each.where].reach(alpha, each.repeats), self._margin)
        ]
        return arms, unsure

    def _named(self, arm: Arm) -> Arm:
        known = self._placed[arm.trial - self._first]
        return replace(arm, name=known.name, engine=known.prepared.facts.version)

    def conclusion(self, why: str | None) -> Conclusion | None:
        """What the rounds say; nothing if there were not two of each arm."""
        if not self._arms():
            return None
        cost = replace(cost_of(self._context, self._run), search_s=0.0)
        whole = len(self._arms()) >= len(self._comparison.arms) and self._rounds.done(self._served())
        if not whole or whole < LEAST_ROUNDS:
            said = unmeasured(
                self._asked, self._run, self._arms(), outcome=self._nothing(),
                sentence=f"Not compared: {why or self._failures()}.", cost=cost, now=self._context.clock(),
                finalists=self._arms()[1:], repeats=whole or 0,
            )  # fmt: skip
        else:
            said = conclude(self._asked, self._run, self._found(), cost, self._context.clock())
        arms = tuple(self._named(arm) for arm in said.finalists)
        base = said.baseline and self._named(said.baseline)
        said = replace(said, baseline=base, finalists=arms)
        return replace(said, sentence=self.sentence(said, why)) if said.measured_again else said

    def _nothing(self) -> Judgement:
        return Judgement.NOT_CONFIRMED if len(self._served()) > 1 else Judgement.NOTHING_SERVED

    def _failures(self) -> str:
        arms = {t.number: self._placed[t.number - self._first].name for t in self._arms()}
        said = [f"{arms[n]}: {why}" for n, why in sorted(self._rounds.dropped.items())]
        return "; ".join(said) or "there were fewer than two rounds"

    def sentence(self, said: Conclusion, why: str | None) -> str:
        """Every arm against the first one, and whether the answer is whole."""
        assert said.baseline is not None
        parts = [against(said.baseline, arm) for arm in said.finalists]
        left = sorted({f"{c.metric} of {arm.name}" for arm, c in undecided(said.finalists, self._margin)})
        if left:
            parts.append(
                f"Open after {many(said.repeats, 'round')} ({why or self._ended}): {', '.join(left)}."
            )
        else:
            small = any(c.word == "open" for arm in said.finalists for c in arm.changes)
            known = f"Every difference is known after {many(said.repeats, 'round')}"
            rest = f"; those that are not clear are the same within {100 * self._margin:g} %" if small else ""
            parts.append(f"{known}{rest}.")
        return " ".join(parts)

    @property
    def _margin(self) -> float:
        return self._comparison.margin

    def summary(self, said: Conclusion | None) -> dict[str, JSON]:
        """The arms, beside what every run's summary repeats of its conclusion."""
        arms: list[JSON] = [_told(arm) for arm in self._placed]
        more: Mapping[str, JSON] = summary_of_conclusion(self._context, said) if said else {}
        return {**more, "compared": arms, "margin": self._margin}


def against(base: Arm, arm: Arm) -> str:
    """One arm against the first one, in a sentence."""
    if arm.dropped is not None:
        return f"{arm.title} did not serve: {arm.dropped.rstrip('.')}."
    if base.dropped is not None:
        return f"{base.title} did not serve, {arm.title} did."
    return f"{arm.title} against {base.title}: {', '.join(map(difference, arm.changes))}."
