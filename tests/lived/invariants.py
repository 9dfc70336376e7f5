"""What must hold after every step of a life, each said in one sentence."""

import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.history.records import newest_conclusion
from tests.lived.world import BASELINE, KILLED, SECRET, World
from tests.service.surfaces import assert_one_truth
from tuner.conclusions import Conclusion, Judgement
from tuner.history.store import Store
from tuner.records import Launch, Run, RunState, Study, Trial, TrialState
from tuner.replay import outcomes

TURNED = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
FLAGS = {name: "--" + name.replace("_", "-") for name in (*TURNED, *BASELINE)}
WON = {Judgement.CLEAR_WINNER, Judgement.TRADE_OFF, Judgement.BASELINE_FAILED, Judgement.SLO_MISSED}
STAYED = {Judgement.BASELINE_STAYS, Judgement.NO_CLEAR_WINNER}
SLACK = timedelta(seconds=1)


@dataclass
class Seen:
    """What was seen so far, to hold the present against; `rows` never change once they have ended."""

    rows: dict[str, object] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    outputs: int = 0
    measured_first: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Now:
    """The history as it is after a step."""

    world: World
    store: Store
    seen: Seen
    studies: Sequence[Study]
    runs: Sequence[Run]
    whole: bool

    def trials(self, study: Study) -> Sequence[Trial]:
        return self.store.trials(study.id)

    @cached_property
    def each(self) -> Sequence[tuple[Study, Sequence[Trial], Sequence[Launch]]]:
        """Studies whose trials may have changed: those of the newest runs."""
        recent = {run.study_id for run in self.runs[: 2 * len(self.world.nodes)]}
        return [(s, self.trials(s), self.store.launches(s.id)) for s in self.studies if s.id in recent]

    def latest(self, study: Study) -> Conclusion | None:
        """The newest conclusion of a study, by when it was drawn."""
        return newest_conclusion(self.store, study.id)

    def page(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """What /metrics tells under a name: labels and number."""
        text = self.world.client().get("/metrics").text
        for family in text_string_to_metric_families(text):
            yield from ((each.labels, each.value) for each in family.samples if each.name == name)


Invariant = Callable[[Now], None]
INVARIANTS: list[Invariant] = []


def invariant(check: Invariant) -> Invariant:
    INVARIANTS.append(check)
    return check


def check(world: World, seen: Seen, *, whole: bool = True) -> None:
    """Every invariant; `whole` also reads every page and report, which takes a second per conclusion."""
    store = world.store()
    try:
        now = Now(world, store, seen, store.studies(), store.runs(), whole)
        for each in INVARIANTS:
            try:
                each(now)
            except AssertionError as broken:
                told = f"{each.__name__}: {each.__doc__}\nstory: {'; '.join(world.story)}\n{broken}"
                raise AssertionError(told) from broken
    finally:
        store.close()


@invariant
def one_conclusion(now: Now) -> None:
    """Every surface tells the same conclusion."""
    for study in now.studies:
        said = now.latest(study)
        if said is None or said.run_id in now.seen.checked:
            continue
        now.seen.checked.add(said.run_id)
        told = said.to_json()
        front = json.loads(now.world.say("front", study.id, "--json").out)
        status = json.loads(now.world.say("run", "status", said.run_id, "--json").out)
        page = now.world.client().get(f"/v1/runs/{said.run_id}").json()
        assert front["conclusion"] == status["conclusion"] == page["conclusion"] == told, said.run_id
        if now.whole:
            assert_one_truth(now.world.home, study, said)


@invariant
def metrics_are_of_the_last_night(now: Now) -> None:
    """/metrics tells what the newest run of a node's last night measured: of that night's runs that measured
    anything the last one that reached a verdict; without one the last that ended.
    """
    if not now.whole:
        return
    wanted: dict[tuple[str, str, str], object] = {}
    for node, said in _last_nights(now).items():
        best = said.arm(said.winner) or said.baseline
        for name, arm in (("today", said.baseline), ("best", best)):
            for metric, value in (arm.confirmed if arm else {}).items():
                if value is not None:
                    wanted[node, metric, name] = pytest.approx(value)
    told = {
        (labels["node"], labels["measurement"], labels["configuration"]): value
        for labels, value in now.page("tuner_confirmed_value")
    }
    assert told == wanted


def _last_nights(now: Now) -> dict[str, Conclusion]:
    """Node → the conclusion of its last night."""
    nights: dict[str, dict[date, list[Conclusion]]] = {}
    for study in now.studies:
        rows = [best for name in study.objectives for best in now.store.bests(model=study.model, metric=name)]
        for best in {best.run_id: best for best in rows if best.study_id == study.id}.values():
            said = now.store.conclusion(best.run_id)
            if said is not None and best.ended_at is not None and not study.compares:
                evening = (best.ended_at - timedelta(hours=12)).date()
                nights.setdefault(study.node, {}).setdefault(evening, []).append(said)
    open_ones = (Judgement.NOT_CONFIRMED, Judgement.NOTHING_SERVED)
    return {
        node: max(evenings[max(evenings)], key=lambda said: (said.outcome not in open_ones, said.at))
        for node, evenings in nights.items()
    }


def _row(value: Any) -> str:
    return json.dumps(asdict(value), sort_keys=True, default=str)


def _past(now: Now) -> Iterator[tuple[str, object]]:
    for run in now.runs:
        if run.state is not RunState.RUNNING:
            yield f"run {run.id}", _row(run)
            said = now.store.conclusion(run.id)
            yield f"conclusion {run.id}", said and json.dumps(said.to_json(), sort_keys=True)
    for _, trials, launches in now.each:
        yield from _ended(trials, launches)
    for profile in now.store.profiles():
        yield f"profile {profile.id}", _row(profile)
    for key in now.store.profile_keys():
        for event in now.store.alias_events(key):
            yield f"event {key.target} {event.alias} {event.generation}", _row(event)


def _ended(trials: Sequence[Trial], launches: Sequence[Launch]) -> Iterator[tuple[str, object]]:
    for trial in trials:
        if trial.state is not TrialState.RUNNING:
            searched = str([m for m in trial.measurements if m.purpose == "search"])
            yield f"trial {trial.id}", (trial.state, trial.reason, dict(trial.candidate), searched)
    for launch in launches:
        if launch.ended_at is not None:
            yield f"launch {launch.id}", _row(launch)


@invariant
def past_stays(now: Now) -> None:
    """The past never changes: what has ended reads the same for ever."""
    for name, row in _past(now):
        if name in now.seen.rows:
            assert now.seen.rows[name] == row, f"{name} was {now.seen.rows[name]} and is {row}"
        now.seen.rows[name] = row


@invariant
def whole_candidates(now: Now) -> None:
    """A candidate is today's configuration with knobs of the space turned, and nothing else."""
    for study, trials, _ in now.each:
        running = now.world.today(study.node)
        for trial in trials:
            kept = {name: value for name, value in trial.candidate.items() if name not in TURNED}
            today = {name: value for name, value in running.items() if name not in TURNED}
            assert kept == today, (trial.number, dict(trial.candidate))
            assert not trial.is_baseline or dict(trial.candidate) == running, dict(trial.candidate)


@invariant
def one_configuration(now: Now) -> None:
    """What was measured is what was launched is what is published."""
    for study, trials, launches in now.each:
        argv = {launch.id: launch.argv for launch in launches}
        by_id = {trial.id: trial for trial in trials}
        for trial in trials:
            _check_measured(trial, argv)
        for profile in now.store.profiles(model=study.model):
            if profile.study_id == study.id and profile.trial_id is not None:
                _check_published(by_id[profile.trial_id], profile, argv)


def _check_measured(trial: Trial, argv: dict[str, tuple[str, ...]]) -> None:
    for measurement in trial.measurements:
        if measurement.launch_id is None:
            continue
        words = argv[measurement.launch_id]
        for name in FLAGS:
            assert _asked(words, name) == trial.candidate.get(name), (trial.number, name, words)
    for name, value in trial.effective.items():
        if trial.state is TrialState.COMPLETE and trial.candidate.get(name) is not None and name in FLAGS:
            assert value == trial.candidate[name], (trial.number, name, value)


def _check_published(trial: Trial, profile: Any, argv: dict[str, tuple[str, ...]]) -> None:
    assert dict(profile.candidate) == dict(trial.candidate), (profile.id, dict(profile.candidate))
    measured = [m.launch_id for m in trial.measurements if m.launch_id]
    assert tuple(profile.argv) in {argv[each] for each in measured}, (profile.id, profile.argv)
    assert profile.evidence["trial_number"] == trial.number
    base = trial.is_baseline
    assert profile.evidence["confirmed"] is not True or not base


def _asked(words: Sequence[str], name: str) -> object:
    """The value of a knob in a command line, as far as it is written there."""
    flag = FLAGS[name]
    if f"--no-{flag[2:]}" in words:
        return False
    if flag not in words:
        return None
    return yaml.safe_load(words[words.index(flag) + 1])


@invariant
def measured_once(now: Now) -> None:
    """One effective configuration is searched once."""
    for _, trials, _ in now.each:
        seen: dict[str, int] = {}
        for trial in trials:
            if trial.state is not TrialState.COMPLETE or trial.is_baseline or trial.origin == "relaunched":
                continue
            key = json.dumps({n: trial.effective.get(n) for n in TURNED}, sort_keys=True)
            assert seen.setdefault(key, trial.number) == trial.number, (seen[key], trial.number, key)


@invariant
def budgets_hold(now: Now) -> None:
    """A run makes no more trials and launches than its budget, and nothing runs after its window."""
    for study, trials, launches in now.each:
        for run in (r for r in now.runs if r.study_id == study.id):
            ours = {t.number for t in trials if t.run_id == run.id}
            assert run.trials_limit is not None
            assert len(ours) <= run.trials_limit, (run.id, ours)
            end = run.ended_at or datetime.max.replace(tzinfo=run.started_at.tzinfo)
            own = [each for each in launches if run.started_at <= each.started_at < end]
            assert len(own) <= 3 * run.trials_limit, (run.id, len(own))
            begun, closes = now.world.window(study.node, run.started_at)
            assert run.deadline is not None
            assert begun <= run.started_at, (run, begun)
            assert run.deadline <= closes, (run, closes)
            for each in own:
                assert each.ended_at is None or each.ended_at <= run.deadline + SLACK, (each, run.deadline)
            assert run.ended_at is None or run.ended_at <= run.deadline + SLACK, run


@invariant
def later_nights_know_more(now: Now) -> None:
    """A later night is not worse informed: a new study of a node begins with the last one's winner."""
    for node in {study.node for study in now.studies}:
        ours = sorted((s for s in now.studies if s.node == node), key=lambda s: s.created_at)
        for before, after in itertools.pairwise(ours):
            if after.id in now.seen.measured_first or before.engine_version != after.engine_version:
                continue
            known = [
                c
                for c in now.store.conclusions(before.id)
                if c.winner is not None and c.at < after.created_at
            ]
            runs = [r for r in now.runs if r.study_id == after.id and r.state is RunState.FINISHED]
            trials = now.trials(after)
            if not known or not runs or len({t.number for t in trials}) < 3 or not _served(trials):
                continue
            now.seen.measured_first.add(after.id)
            arm = known[-1].arm(known[-1].winner)
            assert arm is not None
            wanted = {n: v for n, v in arm.candidate.items() if n in TURNED}
            tried = [{**_effective(t), **{n: t.candidate.get(n) for n in t.candidate}} for t in trials]
            assert any(wanted.items() <= each.items() for each in tried), (node, wanted, tried)


def _effective(trial: Trial) -> dict[str, object]:
    return {name: trial.effective.get(name) for name in TURNED}


def _served(trials: Sequence[Trial]) -> bool:
    return any(t.state is TrialState.COMPLETE for t in trials if t.is_baseline)


@invariant
def success_is_usable(now: Now) -> None:
    """A success is a conclusion that a pipeline can use."""
    if not now.whole:
        return
    told = {labels["node"]: value for labels, value in now.page("tuner_last_success_timestamp_seconds")}
    truth: dict[str, float] = {}
    nodes = {study.id: study.node for study in now.studies}
    for run in now.runs:
        said = now.store.conclusion(run.id)
        if said is None or run.state is not RunState.FINISHED or run.ended_at is None or not _usable(said):
            continue
        node = nodes[run.study_id]
        truth[node] = max(truth.get(node, 0.0), run.ended_at.timestamp())
    shown, real = ({node: round(at) for node, at in each.items()} for each in (told, truth))
    assert shown == real, (shown, real)


def _usable(said: Conclusion) -> bool:
    """It has a winner, or today's configuration stays and served. Where no trial meets the SLO, only a winner
    counts.
    """
    if said.outcome in WON:
        return said.winner is not None
    return said.outcome in STAYED and said.baseline is not None and said.baseline.dropped is None


def _words(process: psutil.Process) -> list[str]:
    """Its command line; empty where it has ended and waits to be reaped."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@invariant
def nothing_outlives(now: Now) -> None:
    """No lease, process or half-written file outlives its reason, and no alias moves by itself."""
    died = bool(now.world.nights) and now.world.nights[-1].said.code == KILLED
    if not died:
        assert not now.store.leases(now=now.world.now), now.store.leases(now=now.world.now)
        others = [_words(each) for each in psutil.Process().children() if each.pid not in now.world.known]
        left = [line for line in others if any(w == "tuner" or w.startswith("tuner.") for w in line)]
        assert not left, left
    assert not list(now.world.home.rglob("*.partial"))
    for event in now.store.aliases():
        if event.alias == "champion":
            assert event.to_version == now.world.champions.get(event.key.target), event


@invariant
def every_launch_is_known(now: Now) -> None:
    """Every launch is in the history, and every failure has a root cause."""
    for study, trials, launches in now.each:
        died = bool(now.world.nights) and now.world.nights[-1].said.code == KILLED
        folder = now.world.home / "trials" / study.id[:16]
        known = {each.directory for each in launches} | {t.directory for t in trials}
        logs = {str(path.parent) for path in folder.rglob("engine.log")}
        assert logs <= known, logs - known
        for trial in trials:
            if trial.state is TrialState.RUNNING:
                assert died, f"trial {trial.number} is left RUNNING"
            elif trial.state is not TrialState.COMPLETE:
                assert trial.reason, trial
                assert trial.state is TrialState.PRUNED or trial.cause, trial
                assert "None" not in trial.reason, trial.reason
            else:
                assert trial.measurement is not None, trial
                assert trial.measurement.values["failed"] <= 0.01 * trial.measurement.values["requests"]
        assert died or all(each.ended_at for each in launches), "a launch is left open"


@invariant
def production_is_back(now: Now) -> None:
    """Production has its node back after every night, also after one whose controller died."""
    first = now.world.nodes[0].name
    mine = [night for night in now.world.nights if night.node == first]
    if not mine or mine[-1].said.code == KILLED:
        return
    place = now.world.home / f"production-{first}"
    assert not place.exists() or place.read_text().strip() == "up", "production is down"
    assert all(node.state == "free" for node in now.store.nodes()), now.store.nodes()


@invariant
def no_secret_is_told(now: Now) -> None:
    """No secret is in any output, file or row."""
    for said in now.world.said[now.seen.outputs :]:
        assert SECRET not in said.out + said.err, said.words
    now.seen.outputs = len(now.world.said)
    own = {now.world.study_file(truth.name) for truth in now.world.nodes}
    # In another process: to close a file of SQLite here would take the locks of our connections with it.
    words = ("grep", "-rlF", "--exclude=*.parquet", "--exclude=*.csv", SECRET, str(now.world.home))
    told = subprocess.run(words, capture_output=True, text=True)
    assert told.returncode in (0, 1), told.stderr
    assert {Path(line) for line in told.stdout.splitlines()} <= own, told.stdout


@invariant
def changes_are_signed(now: Now) -> None:
    """A change is (after - before) / before, "better" is better, and the SLO is met where enough is good."""
    for said in now.store.conclusions():
        for told in said.drift:
            _check_drift(told)
        for arm in (*([said.baseline] if said.baseline else []), *said.finalists):
            if arm.attainment is not None and said.attainment is not None:
                assert arm.slo_met == (arm.attainment >= said.attainment), arm
            for made in arm.changes:
                if not made.before or made.after is None or made.change is None:
                    continue
                assert made.change == pytest.approx((made.after - made.before) / made.before), made
                up = made.metric == "goodput_rps"
                assert made.word == "open" or (made.word == "better") == ((made.change > 0) == up), made


def _check_drift(told: str) -> None:
    """A sentence about a machine that changed calls a latency that rose worse."""
    found = re.search(r"baseline's (\w+) was ([\d.,e+]+) .* and ([\d.,e+]+) .*%, (better|worse);", told)
    assert found is not None, told
    before, after = (float(found[place].replace(",", "")) for place in (2, 3))
    assert (found[4] == "better") == ((after > before) == (found[1] == "goodput_rps")), told


@invariant
def confirmed_by_repeats(now: Now) -> None:
    """A conclusion's values are those of its own repeats."""
    for study, trials, _ in now.each:
        said = now.latest(study)
        for arm in said.finalists if said is not None else ():
            trial = max((t for t in trials if t.number == arm.trial), key=lambda t: t.attempt)
            again = [m.values for m in trial.measurements if m.purpose == "confirm"]
            for name, value in arm.confirmed.items():
                found = [each[name] for each in again]
                assert value is None or (min(found) <= value * 1.0001 and value <= max(found) * 1.0001), (
                    name,
                    arm,
                )


@invariant
def winner_is_published(now: Now) -> None:
    """What is published is the winner, for its own node, card and engine; without one nothing is."""
    cards = {truth.name: f"sim-{truth.card}" for truth in now.world.nodes}
    for study, trials, _ in now.each:
        said = now.latest(study)
        if said is None:
            continue
        assert ("challenger" in said.profiles) == (said.winner is not None), said
        numbers = {t.id: t.number for t in trials}
        for alias, made in said.profiles.items():
            profile = now.store.profile(made.id)
            number = numbers[profile.trial_id or 0]
            assert alias == "baseline" or number == said.winner, (number, said.winner)
            facts = (profile.key.target, profile.gpu_class, profile.engine_version)
            assert facts == (study.node, cards[study.node], study.engine_version), facts


@invariant
def promoted_is_proved(now: Now) -> None:
    """A version that was promoted has a confirmed gain and keeps the SLO."""
    for event in now.store.aliases():
        if event.alias == "champion" and event.to_version is not None:
            profile = now.store.profile_version(event.key, event.to_version)
            assert profile.evidence["confirmed"] is True, profile
            assert profile.evidence["slo_met"] is True, profile


@invariant
def numbers_are_of_requests(now: Now) -> None:
    """A latency is a percentile of all requests from when they were due; a failed one counts as infinite."""
    for _, trials, _ in now.each:
        for trial in trials[-3:]:
            found = trial.measurement
            if trial.state is not TrialState.COMPLETE or found is None or found.kind != "full":
                continue
            files = [part.outcomes_file for part in found.slices if part.outcomes_file]
            waits = [
                o.first_token_s - o.scheduled_s if o.ok and o.first_token_s is not None else np.inf
                for path in files
                for o in outcomes.read(path)
            ]
            assert found.values["requests"] == len(waits)
            told, own = found.values["ttft_p95_ms"], 1000 * np.percentile(waits, (93, 97))
            assert own[0] * 0.999 <= told <= own[1] * 1.001, (told, own)


@invariant
def newest_traffic(now: Now) -> None:
    """A night tunes on the newest traffic of its name."""
    newest = max(now.store.traces(), key=lambda trace: trace.created_at).digest
    for run in now.runs[:1]:
        study = next(s for s in now.studies if s.id == run.study_id)
        if now.world.captured <= run.started_at:
            assert study.trace_digest == newest, (study.trace_digest, newest)


@invariant
def runs_end(now: Now) -> None:
    """A run that ended has a conclusion, one that died is resumed, and the audit has every night."""
    died = bool(now.world.nights) and now.world.nights[-1].fault in ("killed", "killed early", "disk full")
    left = [run for run in now.runs if run.state is RunState.RUNNING]
    assert died or not left, left
    for run in now.runs:
        if run.state is RunState.FINISHED:
            assert now.store.conclusion(run.id) is not None or run.reason, run
            assert now.store.conclusion(run.id) is not None or not _of(now, run), run
    told = [entry for entry in now.store.audit(limit=9999) if entry.action.startswith("schedule.")]
    ended = [n for n in now.world.nights if n.said.code in (0, 9)]
    assert len(told) >= len({(n.node, n.at) for n in ended if "nothing is due" not in n.said.err})


def _of(now: Now, run: Run) -> list[Trial]:
    return [trial for trial in now.store.trials(run.study_id) if trial.run_id == run.id]
