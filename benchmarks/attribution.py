"""Which knobs of a planted winner are left out, on the simulated engine in virtual time.

    python -m benchmarks.attribution [--cases 24] [--out FILE.jsonl]

Every case measures a search of 24 random candidates, confirms a planted winner against the baseline, and
attributes it. The winner turns a knob that pays and one to three that do nothing at this load; in every third
case two limits do the work, of which either one alone would. In two of six cases there is no simulator, and
every knob is measured. The time of a step differs by 1 % between launches (one standard deviation); every
case has a stretch of the bundled trace of its own. What a knob is worth is the noiseless prediction of the
same engine with and without it. Where the winner lifts today's limit of sequences, that limit is so low for
the card and the stretch that requests wait, by the same prediction. A case whose winner is not confirmed has
nothing to attribute.
"""

import argparse
import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks import planted as shared
from tuner.conclusions import Attribution
from tuner.history.store import Store
from tuner.records import JSON, Candidate, Run, Trial, TrialState, Value
from tuner.simulator.cost import card_of, preset
from tuner.simulator.predict import Predictor
from tuner.tuning.attempt import MeasureOptions, perform
from tuner.tuning.attribution import PAYS, Attributing
from tuner.tuning.confirm import Confirmation, label_of
from tuner.tuning.context import RunContext, silent
from tuner.tuning.execution import register
from tuner.tuning.finalists import worse_by
from tuner.tuning.next_trial import StudyPredictor, scene_of
from tuner.tuning.study import Prepared
from tuner.tuning.virtual import on_virtual_time

SEARCH = 24
INERT: dict[str, Value] = {
    "watermark": 0.01, "gpu_memory_utilization": 0.9, "long_prefill_token_threshold": 16000,
}  # fmt: skip
QUEUES = 10
LIMITS = (32, 24, 20, 16, 12, 10, 8, 6, 4)
"""Today's limit is the highest with which the median TTFT is QUEUES times that of the winner."""

PAIR = {"max_num_batched_tokens": 512, "max_num_scheduled_tokens": 512}
"""Two limits on the tokens of a step: dropping either leaves the other, dropping both loses."""


def planted(number: int) -> tuple[dict[str, Value], str]:
    """(the winner, the objective) of a case."""
    draw = random.Random(number)
    names = ["watermark", "gpu_memory_utilization", "long_prefill_token_threshold"]
    inert = {name: INERT[name] for name in draw.sample(names, 1 + number % 3)}
    if number % 3 == 2:
        return {**PAIR, **inert}, "tpot_p95_ms"
    if number % 2:
        return {"max_num_seqs": 48, **inert}, "ttft_p50_ms"
    return {"max_num_batched_tokens": 512, **inert}, "tpot_p95_ms"


def without_simulator(number: int) -> bool:
    """Whether a case has no simulator: its knobs are measured."""
    return number % 6 in (3, 4)


def prepared_of(number: int, folder: Path) -> tuple[Prepared, Candidate]:
    """The study of a case, and its winner."""
    knobs, objective = planted(number)
    winner = Candidate(knobs)
    more: dict[str, JSON] = {"slo": {"ttft_ms": 5000, "tpot_ms": 100}, "objectives": [objective]}
    prepared = shared.study(random.Random(1000 + number), folder, more)
    if "max_num_seqs" not in winner:
        return prepared, winner
    truth, limited = truth_of(prepared), [Candidate({"max_num_seqs": limit}) for limit in LIMITS]
    long = QUEUES * truth([winner])[0].values[objective]
    today = next(c for c in limited if truth([c])[0].values[objective] >= long)
    more["baseline"] = dict(today)
    return shared.study(random.Random(1000 + number), folder, more), winner


def truth_of(prepared: Prepared) -> Predictor:
    """The engine of a case without noise."""
    card = card_of(prepared.file.engine.card)
    return Predictor(scene_of(prepared, card), preset(card), spreads=False)


async def measured(number: int, folder: Path) -> tuple[Attribution | None, Prepared, Trial, Trial]:
    """A case's attribution, with its study, baseline and winner; None: the winner was not confirmed."""
    prepared, winner = prepared_of(number, folder)
    store = Store("sqlite://")
    context = on_virtual_time(
        RunContext(prepared=prepared, store=store, home=folder, clock=lambda: shared.NOW, tell=silent)
    )
    register(context)
    run = store.open_run(
        prepared.study.id, trials_limit=None, deadline=None, now=context.clock(), pid=None, host=""
    )
    draw = random.Random(2000 + number)
    others = [Candidate({"max_num_seqs": draw.choice([16, 32, 64])}) for _ in range(SEARCH - 2)]
    trials = [
        await launched(context, run, candidate, place)
        for place, candidate in enumerate((prepared.baseline, winner, *others))
    ]
    confirmation = Confirmation(context=context, run=run, chosen=[trials[1]], label=label_of(run.id))
    await confirmation.measure()
    said = confirmation.conclusion()
    if said.winner != 1:
        return None, prepared, trials[0], trials[1]
    known = StudyPredictor(prepared=prepared).calibrated(store.trials(run.study_id))
    work = Attributing(
        context=context, run=run, said=said, base=trials[0], winner=trials[1], label=label_of(run.id),
        predict=known.predict if known and not without_simulator(number) else None,
    )  # fmt: skip
    found = await work.find()
    assert found is not None
    return found, prepared, trials[0], trials[1]


async def launched(context: RunContext, run: Run, candidate: Candidate, number: int) -> Trial:
    """One trial of the search."""
    trial = context.store.start_trial(
        study_id=run.study_id, run_id=run.id, candidate=candidate, number=number, attempt=0, seed=0,
        origin="search" if number else "baseline", now=context.clock(), directory=None,
    )  # fmt: skip
    done = await perform(context, trial, [], MeasureOptions())
    assert number > 1 or done.state is TrialState.COMPLETE, done.reason
    return done


def row_of(number: int, folder: Path) -> dict[str, JSON]:
    """What was left out in a case, and what that is worth."""
    found, prepared, base, winner = asyncio.run(measured(number, folder))
    if found is None:
        return {"case": number, "confirmed": False}
    truth = truth_of(prepared)
    objective = prepared.study.objectives[0]
    today, won = base.candidate, winner.candidate

    def loss(names: list[str]) -> float:
        left = {n: v for n, v in won.items() if n not in names}
        less = Candidate({**left, **{n: today[n] for n in names if n in today}})
        whole, other = (truth([c])[0].values[objective] for c in (won, less))
        return worse_by(objective, whole, other)

    turned = [g.name for g in found.knobs]
    dropped = [g.name for g in found.knobs if not g.kept] if found.published else []
    inert = [name for name in turned if abs(loss([name])) < 0.005 and not (number % 3 == 2 and name in PAIR)]
    return {
        "case": number, "confirmed": True,
        "turned": list(turned), "inert": list(inert), "dropped": list(dropped),
        "worth": round(loss(dropped), 4) if dropped else 0.0, "published": found.published,
        "how": {g.name: g.how for g in found.knobs}, "share": round(found.seconds / found.search_s, 3),
        "sentence": found.sentence,
    }  # fmt: skip


def report(rows: list[dict[str, JSON]]) -> Iterator[str]:
    """The figures as lines."""
    confirmed = [row for row in rows if row["confirmed"]]
    yield f"cases of which the winner was confirmed: {len(confirmed)} of {len(rows)}"
    rows = confirmed
    inert = [(set(r["inert"]), set(r["dropped"])) for r in rows]  # type: ignore[arg-type]
    whole, gone = sum(len(i) for i, _ in inert), sum(len(i & d) for i, d in inert)
    yield f"inert knobs left out: {gone} of {whole}"
    yield f"largest loss by what was left out: {max(float(str(r['worth'])) for r in rows):+.1%}"
    lost = sum(float(str(r["worth"])) > PAYS for r in rows)
    yield f"cases that lose more than {PAYS:.0%}: {lost} of {len(rows)}"
    yield f"largest share of the search's seconds: {max(float(str(r['share'])) for r in rows):.0%}"


def main() -> None:
    """Run what is missing and print the figures."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--cases", type=int, default=24)
    asked.add_argument("--out", type=Path, default=Path("docs/results/attribution.jsonl"))
    given = asked.parse_args()
    rows = shared.rows(given.out, "case", list(range(given.cases)), row_of)
    print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
