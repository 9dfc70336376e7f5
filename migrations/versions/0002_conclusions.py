"""Conclusions and attributions: what each run found, written once"""

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OUTCOMES = {
    "clear winner": "clear winner",
    "winner with a trade-off": "trade-off",
    "winner without a baseline": "baseline failed",
    "no clear winner": "no clear winner",
    "no verdict": "nothing served",
    "not confirmed": "not confirmed",
}
"""What an earlier release called its verdicts → what they are called from here on."""
WORDS = {"better": "better", "worse": "worse"}


def upgrade() -> None:
    op.create_table(
        "conclusions",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("study_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("outcome", sa.String(length=40), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_conclusions_run_id_runs"),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_conclusions_study_id_studies"),
        sa.PrimaryKeyConstraint("run_id", name="pk_conclusions"),
    )
    op.create_index("ix_conclusions_study_id_at", "conclusions", ["study_id", "at"], unique=False)
    op.create_table(
        "attributions",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("study_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attributions_run_id_runs"),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_attributions_study_id_studies"),
        sa.PrimaryKeyConstraint("run_id", name="pk_attributions"),
    )
    op.create_index("ix_attributions_study_id_at", "attributions", ["study_id", "at"], unique=False)
    _take_over()


def downgrade() -> None:
    op.drop_table("attributions")
    op.drop_table("conclusions")


def _take_over() -> None:
    """A conclusion for every run that ended, from the summary that it kept: what was said then, no more."""
    connection = op.get_bind()
    moment = sa.DateTime(timezone=True)
    runs = sa.table("runs", *map(sa.column, ("id", "study_id", "state", "summary", "reason")),
                    sa.column("ended_at", moment))  # fmt: skip
    new = sa.table("conclusions", *map(sa.column, ("run_id", "study_id", "outcome", "document")),
                   sa.column("at", moment))  # fmt: skip
    ended = sa.select(runs).where(runs.c.state != "RUNNING", runs.c.ended_at.is_not(None))
    for run in connection.execute(ended.order_by(runs.c.ended_at)).mappings().all():
        said = _conclusion(run, _trials(connection, run["study_id"]))
        connection.execute(
            sa.insert(new).values(
                run_id=run["id"], study_id=run["study_id"], at=run["ended_at"], outcome=said["outcome"],
                document=json.dumps(said, sort_keys=True, separators=(",", ":")),
            )
        )  # fmt: skip


def _trials(connection: sa.Connection, study_id: str) -> dict[int, dict[str, Any]]:
    """The last attempt of every number of a study."""
    trials = sa.table(
        "trials",
        *map(sa.column, ("study_id", "run_id", "number", "attempt", "candidate", "state", "gpu_seconds")),
    )
    query = sa.select(trials).where(trials.c.study_id == study_id).order_by(trials.c.number, trials.c.attempt)
    return {row["number"]: dict(row) for row in connection.execute(query).mappings()}


def _conclusion(run: Mapping[Any, Any], trials: dict[int, dict[str, Any]]) -> dict[str, Any]:
    summary = json.loads(run["summary"]) if isinstance(run["summary"], str) else dict(run["summary"])
    ours = [t for t in trials.values() if t["run_id"] == run["id"]]
    outcome = OUTCOMES.get(str(summary.get("verdict")))
    sentence = summary.get("sentence")
    if outcome is None or not isinstance(sentence, str):
        done = any(t["state"] == "COMPLETE" for t in ours)
        outcome = "not confirmed" if done else "nothing served"
        began = "The finalists were not measured again" if done else "No trial completed"
        sentence = f"{began}: {run['reason'] or 'the run ended'}."
    base = summary.get("baseline")
    finalists = [n for n in _numbers(summary.get("finalists")) if n in trials]
    dropped = summary.get("dropped") if isinstance(summary.get("dropped"), dict) else {}
    finalists += [int(n) for n in dropped if n.isdigit() and int(n) in trials and int(n) not in finalists]
    at = run["ended_at"].isoformat() + ("" if run["ended_at"].tzinfo else "Z")
    return {
        "run_id": run["id"],
        "study_id": run["study_id"],
        "at": at,
        "outcome": outcome,
        "sentence": sentence,
        "winner": summary.get("winner"),
        "baseline": _arm(base, trials, None, summary) if base in trials else None,
        "finalists": [_arm(n, trials, base, summary) for n in finalists if n != base],
        "drift": [str(each) for each in summary.get("drift") or []],
        "cost": {"search_s": round(sum(t["gpu_seconds"] for t in ours), 1), "confirm_s": 0.0, "gpus": 0},
        "repeats": max((int(row["repeats"]) for row in _rows(summary)), default=0),
        "profiles": _profiles(summary.get("profiles")),
        "demonstration": summary.get("demonstration") is True,
    }


def _numbers(found: object) -> list[int]:
    return [n for n in found if isinstance(n, int)] if isinstance(found, list) else []


def _rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = summary.get("comparisons")
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _profiles(found: object) -> dict[str, dict[str, int]]:
    named = found if isinstance(found, dict) else {}
    return {alias: {"id": row["id"], "version": row["version"]} for alias, row in named.items()}


def _arm(
    number: int, trials: dict[int, dict[str, Any]], base: int | None, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """One configuration as it was told of then; its values were not kept."""
    candidate = json.loads(trials[number]["candidate"])
    before = json.loads(trials[base]["candidate"]) if base in trials else None
    changed = {} if before is None else {
        name: [before.get(name), candidate.get(name)]
        for name in sorted({*before, *candidate})
        if (name in before, before.get(name)) != (name in candidate, candidate.get(name))
    }  # fmt: skip
    dropped = summary.get("dropped") or {}
    return {
        "trial": number,
        "candidate": candidate,
        "changed": changed,
        "dropped": dropped.get(str(number)),
        "changes": [_change(row) for row in _rows(summary) if row["number"] == number],
    }


def _change(row: Mapping[str, Any]) -> dict[str, Any]:
    """A ratio of then as a change; null was an interval without an end."""
    change, low, high = (None if row[name] is None else row[name] - 1 for name in ("ratio", "low", "high"))
    return {
        "metric": row["metric"], "where": row["where"], "before": None, "after": None, "change": change,
        "low": -1.0 if low is None else low, "high": high, "word": WORDS.get(row["verdict"], "open"),
        "repeats": row["repeats"],
    }  # fmt: skip
