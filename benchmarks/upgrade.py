"""Upgrade checks on planted releases of the simulated engine, in virtual time: are regressions found, is the
cause right, how often is there an alarm where nothing changed, and what does stopping early save.

    python -m benchmarks.upgrade [--regressions 60] [--same 100] [--out FILE.jsonl]

Every case has a stretch of the bundled trace, a seed and a start-up time of its own, and its launches differ
by a random factor of 1 % (one standard deviation). The releases: steps that take 15 % longer (the code), a
default that moved and matters for the case's configuration (the default), a flag with a new name, and for the
A/A cases nothing but the version. Rows are appended to the file; what is there is not run again.
"""

import argparse
import asyncio
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

from benchmarks import planted
from tuner.conclusions import UpgradeFinding
from tuner.history.store import Store
from tuner.records import JSON, Run
from tuner.tuning.comparison import MARGIN, ROUNDS
from tuner.tuning.run import RunLimits, tune
from tuner.tuning.upgrade import upgrade_check

STUDY: Mapping[str, JSON] = {
    "slo": {"ttft_ms": 500, "tpot_ms": 50}, "objectives": ["ttft_p50_ms", "tpot_p50_ms"],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One planted release. `cause` is code, default, renamed or none; `knob` the default or flag."""

    name: str
    cause: str
    release: Mapping[str, JSON]
    baseline: Mapping[str, JSON]
    knob: str = ""


FLIPS: tuple[tuple[str, Mapping[str, JSON], Mapping[str, JSON]], ...] = (
    ("max_num_batched_tokens", {"max-num-batched-tokens": 128}, {"max_num_seqs": 64}),
    ("max_num_seqs", {"max-num-seqs": 6}, {"max_num_batched_tokens": 2048}),
    ("async_scheduling", {"async-scheduling": False}, {"max_num_seqs": 64}),
    ("enforce_eager", {"enforce-eager": True}, {"max_num_seqs": 64}),
)
NAMES = ("max-running-seqs", "max-num-sequences", "max-num-seqs-per-step")


def cases(regressions: int, same: int) -> Iterator[Case]:
    """A third slower code, a third moved defaults, a third renamed flags on slower code; then A/A."""
    for number in range(regressions):
        kind = number % 3
        if kind == 0:
            yield Case(name=f"code-{number}", cause="code", release={"slower": 1.15},
                       baseline={"max_num_seqs": 32 if number % 2 else 64})  # fmt: skip
        elif kind == 1:
            knob, defaults, baseline = FLIPS[number // 3 % len(FLIPS)]
            yield Case(name=f"default-{number}", cause="default", release={"defaults": dict(defaults)},
                       baseline=baseline, knob=knob)  # fmt: skip
        else:
            renamed = {"max-num-seqs": NAMES[number // 3 % len(NAMES)]}
            yield Case(name=f"renamed-{number}", cause="code", baseline={"max_num_seqs": 64},
                       release={"renamed": renamed, "slower": 1.15}, knob="max_num_seqs")  # fmt: skip
    for number in range(same):
        yield Case(name=f"same-{number}", cause="none", release={}, baseline={"max_num_seqs": 64})


def run_case(case: Case, folder: Path) -> dict[str, JSON]:
    """The row of one case."""
    prepared = planted.study(random.Random(case.name), folder, {**STUDY, "baseline": dict(case.baseline)})
    release = folder / "release.yaml"
    release.write_text(yaml.safe_dump({"version": "0.33.0", **case.release}))
    store = Store("sqlite://")
    check = upgrade_check(
        prepared, store, old="", new=str(release), configuration="today", base=folder, rounds=ROUNDS,
        margin=MARGIN,
    )  # fmt: skip
    run = asyncio.run(
        tune(check, store, home=folder / case.name, limits=RunLimits(), clock=lambda: planted.NOW)
    )
    return row_of(case, store, run)


def row_of(case: Case, store: Store, run: Run) -> dict[str, JSON]:
    """What the case's check found, and its GPU-seconds beside those of all rounds for all its arms."""
    found = UpgradeFinding.from_json(run.summary["upgrade"])
    launches = store.launches(run.study_id)
    spans = [(each.ended_at - each.started_at).total_seconds() for each in launches if each.ended_at]
    arms = len({(each.directory or "").rsplit("/", 1)[-1][:4] for each in launches})
    alarm = bool(found.worse) or found.fault in ("start", "default")
    guilty = [m.name for m in found.moved if m.guilty]
    right = found.fault == case.cause and (case.cause != "default" or guilty == [case.knob])
    if "renamed" in case.release:
        right = right and [(k.name, bool(k.successor)) for k in found.lost] == [(case.knob, True)]
    return {
        "name": case.name, "planted": case.cause, "knob": case.knob, "alarm": alarm, "cause": found.fault,
        "guilty": list(guilty), "right": right, "advice": found.advice, "worse": list(found.worse),
        "seconds": round(sum(spans), 1), "share": round(len(spans) / (arms * ROUNDS), 3), "arms": arms,
    }  # fmt: skip


def report(rows: list[dict[str, JSON]]) -> Iterator[str]:
    """The figures as lines."""
    planted = [r for r in rows if r["planted"] != "none"]
    same = [r for r in rows if r["planted"] == "none"]
    found = [r for r in planted if r["alarm"]]
    yield f"regressions found: {len(found)} of {len(planted)}"
    for kind in ("code", "default", "renamed"):
        ours = [r for r in planted if str(r["name"]).startswith(kind)]
        told = sum(bool(r["right"]) for r in ours)
        yield f"  {kind}: {sum(bool(r['alarm']) for r in ours)} of {len(ours)} found, cause right in {told}"
    yield f"cause right where found: {sum(bool(r['right']) for r in found)} of {len(found)}"
    yield f"alarms in A/A: {sum(bool(r['alarm']) for r in same)} of {len(same)}"
    for name, ours in (("regressions", planted), ("A/A", same), ("all", rows)):
        shares = [float(str(r["share"])) for r in ours]
        if shares:
            yield f"GPU-seconds beside {ROUNDS} rounds of all arms, median of {name}: {median(shares):.2f}"


def main() -> None:
    """Run what is missing and print the figures."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--regressions", type=int, default=60)
    asked.add_argument("--same", type=int, default=100)
    asked.add_argument("--out", type=Path, default=Path("docs/results/upgrade.jsonl"))
    given = asked.parse_args()
    asked_for = list(cases(given.regressions, given.same))
    names = [case.name for case in asked_for]
    rows = planted.rows(given.out, "name", names, lambda place, folder: run_case(asked_for[place], folder))
    print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
