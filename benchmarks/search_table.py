"""The measured tables (benchmarks/table) as worlds of `benchmarks/search.py`. A search stays inside a table:
the row that a real card measured answers a proposal, for the seconds that the card was held.

Our search ranks the rows themselves: they are its pool. Optuna's samplers take no list of rows, so a draw of
theirs stands for the nearest row that was not tried yet (the levels of each knob from 0 to 1). The first
candidates, by a guide or a prediction, stand for the nearest row too. Random search draws from the rows, and
the grid has the rows that differ from the baseline in its two knobs alone.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from search_truth import NOW, TRUTHS, Failure, Result, World

from benchmarks.table import load
from benchmarks.table.measure import RULER, Plan, read_plan
from tuner.knobs.arguments import GRAPHS, with_acting_graphs
from tuner.knobs.discover import GpuKind, facts_of_version
from tuner.knobs.space import SearchSpace
from tuner.records import JSON, Candidate, Node, Trial, Value, Violation
from tuner.search import acquisition, sampler, trial_view
from tuner.search.acquisition import StudyView
from tuner.search.trial_view import Encoding, Point, encode
from tuner.simulator.cost import CARDS
from tuner.traffic import trace as traces
from tuner.tuning import next_trial, study
from tuner.tuning.next_trial import StudyPredictor, scene_of
from tuner.tuning.study import StudyFile
from tuner.tuning.survey import Surveyed

TABLES: Mapping[str, Mapping[str, Value]] = {"h200-7b": {}, "h200-32b": {"gpu_memory_utilization": 0.56}}
"""The tables, and the configuration that a study of each begins with."""

NUMBERS = ("scheduled_s", "first_token_s", "last_token_s", "output_tokens")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rows(SearchSpace):
    """The space of a table's knobs, of which only what has a row is inside."""

    world: "TableWorld"

    def contains(self, candidate: Mapping[str, Value]) -> bool:
        return self.world.has(candidate) and super().contains(candidate)

    def points(self, encoding: Encoding) -> list[Point]:
        """Where the rows lie, without those that a narrower encoding has no place for."""
        ran, found = self.world.ran, [(each, encoding.point(each)) for each in self.world.whole]
        return [p for each, p in found if p is not None and ran(encoding.candidate(p)) == ran(each)]

    def near(self, encoding: Encoding, point: Point) -> list[Point]:
        """The rows, the nearest to a point first."""
        widths = np.maximum(np.array(encoding.sizes) - 1, 1)
        points = self.points(encoding)
        apart = [float((((np.array(p) - point) / widths) ** 2).sum()) for p in points]
        return [points[int(i)] for i in np.argsort(apart, kind="stable")]


class TableWorld(World):
    """A table: its study as the product reads it, and each row as what a candidate measures."""

    truth_of = replace(TRUTHS["A"], noise=0.0, screened=0.0)
    tail_s = RULER.tail_limit_s

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        plan = read_plan(load.HERE / f"{name}.yaml")
        found = [r for r in load.rows(name) if not r["repeat"] and r["state"] != "REFUSED"]
        base = next(r for r in found if r["knobs"] == TABLES[name] and r["how"] == "relaunched")
        card = CARDS["h200"]
        self._facts = facts_of_version(
            base["engine"], gpu=GpuKind(name=card.title, memory_gib=card.memory_gib)
        )
        names = sorted({knob for row in found for knob in row["knobs"]})
        own = {n: v for n, v in base["effective"].items() if v is not None}
        self._own = {n: None if n == GRAPHS else own.get(n, self._facts.defaults.get(n)) for n in names}
        self._graphs = sorted({row["knobs"][GRAPHS] for row in found if GRAPHS in row["knobs"]})
        self._rows: dict[Candidate, list[Row]] = {}
        for row in sorted(found, key=lambda r: (r["how"], r["key"])):  # relaunched ones first
            self._rows.setdefault(self.ran(row["knobs"]), []).append(row)
        self.candidates = [Candidate(of[0]["knobs"]) for of in self._rows.values()]
        self.whole = [Candidate({n: v for n, v in c.items() if v is not None}) for c in self._rows]
        self._read_as_study(plan, folder, TABLES[name])
        self._scene_from(scene_of(self.prepared, card))
        self.objectives = self.prepared.study.objectives
        self._known = {row["key"]: self._result(row) for row in found}
        self.compared = tuple(
            (ran, result) for ran in self._rows if isinstance(result := self.truth(ran), Result)
        )

    def _read_as_study(self, plan: Plan, folder: Path, baseline: Mapping[str, Value]) -> None:
        path, levels = folder / f"{self.name}.parquet", dict[str, JSON]()
        traces.write(plan.trace, path)
        for knob in self._own:
            values = {v for c in (self._own, *self.candidates) if (v := c.get(knob)) is not None}
            levels[knob] = {"values": sorted(values), "default": knob == GRAPHS}
        space = folder / f"{self.name}-space.yaml"
        space.write_text(yaml.safe_dump({"knobs": levels}))
        span, slo = plan.trace.duration_s + 1e-3, plan.slo
        words = [*plan.args, "--"]
        args = {
            flag.removeprefix("--"): True if value.startswith("--") else yaml.safe_load(value)
            for flag, value in pairwise(words)
            if flag.startswith("--")
        }
        ruler = ("warmup_waves", "warmup_requests", "warmup_limit_s", "load_warmup_s", "tail_limit_s")
        file = StudyFile.model_validate(
            {
                "name": self.name, "model": plan.model, "trace": str(path), "space": str(space),
                "engine": {"kind": "vllm", "python": "python3", "args": args}, "baseline": dict(baseline),
                "slices": [{"start_s": 0.0, "duration_s": span}], "speed": plan.speed,
                "plan": {"priming_turnovers": 0, **{name: getattr(RULER, name) for name in ruler}},
                "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "attainment": slo.attainment},
            }
        )  # fmt: skip
        node = Node(name="local", gpu_class="h200")
        host = Surveyed(command=("vllm",), facts=self._facts, node=node)
        found = study.prepare(file, name=self.name, base=folder, store=None, now=NOW, surveyed=host)
        whole = {each.name: getattr(found.space, each.name) for each in fields(found.space)}
        self.prepared = replace(found, space=Rows(**whole, world=self))
        self.window_s = span / plan.speed

    @property
    def defaults(self) -> Candidate:
        return Candidate(self._own)

    def ran(self, candidate: Mapping[str, Value]) -> Candidate:
        asked = {**self._own, **{n: v for n, v in candidate.items() if v is not None}}
        acting = with_acting_graphs(asked, self._graphs)
        return Candidate({n: acting.get(n) for n in self._own})

    @property
    def digest(self) -> str:
        """Of the rows, and of the code that makes a world of them."""
        files = [Path(__file__), load.HERE / self.name / "rows.parquet"]
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]

    def has(self, candidate: Mapping[str, Value]) -> bool:
        return self.ran(candidate) in self._rows

    def _row(self, ran: Candidate, launched: Candidate | None) -> Row:
        """The row of a candidate: in the running engine, else the relaunched one, else the first there is."""
        found = self._rows[ran]
        return next((r for r in found if launched and self._in(r, launched)), found[0])

    def _in(self, row: Row, launched: Candidate) -> bool:
        return self.ran(row["launched"]) == self.ran(launched)

    def truth(self, candidate: Candidate, launched: Candidate | None = None) -> Result | Failure:
        return self._known[self._row(self.ran(candidate), launched)["key"]]

    def _result(self, row: Row) -> Result | Failure:
        if row["state"] != "COMPLETE":
            violation = Violation(kv=row.get("violated_kv"), oom=row.get("violated_oom"))
            return Failure(violation=violation, cause=row["cause"])
        seen = load.outcomes(self.name, row["key"])
        column = {n: np.array([np.nan if r[n] is None else r[n] for r in seen], float) for n in NUMBERS}
        failed = np.array([r["error"] is not None for r in seen])
        due, first, last = column["scheduled_s"], column["first_token_s"], column["last_token_s"]
        later = column["output_tokens"] - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot = np.where(later > 0, (last - first) / later * 1e3, np.nan)
        ttft, tpot, e2e = (
            np.where(failed, np.inf, each) for each in ((first - due) * 1e3, tpot, (last - due) * 1e3)
        )
        values = {n: v for n, v in row.items() if isinstance(v, float)}
        return Result(
            values=values, due=due, ttft=ttft, tpot=tpot, e2e=e2e, outputs=column["output_tokens"],
            blocks=0, used=0.0,
        )  # fmt: skip

    def launch_s(self, ran: Candidate, compiled: bool) -> float:
        """What the launch of the row took; of one that was only screened, that of its engine."""
        return float(self._row(ran, None)["ready_s"])

    def failed_s(self, ran: Candidate, failure: Failure) -> float:
        return float(self._row(ran, None)["seconds"])

    def lead_s(self, ran: Candidate, launched: Candidate | None) -> float:
        """What the row's replay took beside its window and tail."""
        row = self._row(ran, launched)
        result = self._known[row["key"]]
        if not isinstance(result, Result):
            raise TypeError(f"{ran} cannot run")
        replay = row["seconds"] - (row["ready_s"] if row["how"] == "relaunched" else 0.0)
        ends = np.minimum(result.due + result.e2e / 1e3, self.window_s + self.tail_s)
        return float(replay - max(self.window_s, ends.max()))

    def engines(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """What the candidate's rows were launched with; the one it was screened in first."""
        found = sorted(self._rows[self.ran(candidate)], key=lambda row: row["how"], reverse=True)
        return tuple(Candidate(row["launched"]) for row in found)

    def holds(self, launched: Candidate, candidate: Candidate) -> bool:
        return any(self._in(row, launched) for row in self._rows[self.ran(candidate)])

    def drawn(self, rng: np.random.Generator) -> Iterator[Candidate]:
        found = self.grid(list(self._own))
        yield from (found[int(i)] for i in rng.permutation(len(found)))

    def grid(self, names: Sequence[str]) -> list[Candidate]:
        """The rows that differ from the baseline, and in these knobs alone."""
        base = self.ran({})
        differ = [({n for n, v in self.ran(c).items() if base[n] != v}, c) for c in self.candidates]
        return [c for knobs, c in differ if knobs and knobs <= set(names)]


# ---- how a search stays inside a table: the places of the product where candidates come from


def _pool(encoding: Encoding, seed: int) -> list[Point]:
    space = encoding.space
    if not isinstance(space, Rows):
        return POOL(encoding, seed)
    points = space.points(encoding)
    return [points[int(i)] for i in np.random.default_rng(seed).permutation(len(points))]


def _draws(
    plain: optuna.samplers.BaseSampler,
    encoding: Encoding,
    trials: Sequence[optuna.trial.FrozenTrial],
    limit: int,
) -> Iterator[Point]:
    space = encoding.space
    for point in DRAWS(plain, encoding, trials, limit):
        yield from space.near(encoding, _settled(encoding, point)) if isinstance(space, Rows) else [point]


def _settled(encoding: Encoding, point: Point) -> Point:
    """A level that says « the engine's own » lies where that value does."""
    return encoding.point(encoding.candidate(point)) or point


def _first(predictor: StudyPredictor, trials: Sequence[Trial]) -> tuple[next_trial.Seed, ...]:
    found, space = FIRST(predictor, trials), predictor.prepared.space
    if not isinstance(space, Rows):
        return found
    encoding = encode(space, trial_view.defaults_of(trials))
    return tuple(
        (origin, each if space.world.has(each) or (point := encoding.point(each)) is None
         else encoding.candidate(space.near(encoding, point)[0]))
        for origin, each in found
    )  # fmt: skip


def _leftover(history: StudyView, seed: int, number: int) -> Iterator[next_trial.Drawn]:
    if not isinstance(history.space, Rows):
        yield from LEFTOVER(history, seed, number)
        return
    for point in _pool(history.encoding, trial_view.derive(seed, number, "leftover")):
        yield "random", history.encoding.candidate(point), 0.0


POOL, DRAWS, FIRST = acquisition.pool, sampler.draws, next_trial.first_candidates
LEFTOVER = next_trial._leftover
acquisition.pool, sampler.draws, next_trial.first_candidates = _pool, _draws, _first
next_trial._leftover = _leftover
