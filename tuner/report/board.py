"""A study as people look at it: the front beside the baseline, who won, and the points of its pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from tuner.records import Run, Study, Trial, TrialState
from tuner.report.charts import MARKED, Point
from tuner.report.words import knobs, measured, ratio
from tuner.search import pareto

SHOWN = ("slo_attainment", "request_rps", "failed", "preemptions", "prefix_hit_rate", "ready_s")
MAX_CHARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One row of the front's table: a trial, and its change against the baseline per objective."""

    trial: Trial
    kind: str
    ratios: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A study's trials sorted out. `run` is the newest run that came to a verdict, `winner` its choice."""

    study: Study
    trials: tuple[Trial, ...]
    base: Trial | None
    front: tuple[Trial, ...]
    winner: int | None
    run: Run | None

    @property
    def columns(self) -> list[str]:
        """The measurements that tables show: objectives first."""
        objectives = self.study.objectives
        return [*objectives, *(name for name in SHOWN if name not in objectives)]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of objectives that are drawn against each other."""
        return list(combinations(self.study.objectives, 2))[:MAX_CHARTS]

    @property
    def chosen(self) -> Trial | None:
        """The winner, where it is another than the baseline."""
        found = (t for t in reversed(self.trials) if t.number == self.winner and t.measurement)
        return next((t for t in found if t.state is TrialState.COMPLETE and not t.is_baseline), None)

    @property
    def chosen_on_front(self) -> bool:
        """Whether the winner is on the front, which is of first measurements."""
        return self.chosen is not None and any(t.id == self.chosen.id for t in self.front)

    def kind(self, trial: Trial) -> str:
        """baseline, winner, front or other."""
        if trial.is_baseline:
            return "baseline"
        if trial.number == self.winner and trial.state is TrialState.COMPLETE:
            return "winner"
        return "front" if any(trial.id == other.id for other in self.front) else "other"

    def beside(self) -> list[Beside]:
        """The baseline first, then the winner where it is not on the front, then the front."""
        base = values(self.base)
        rows = [
            *([self.base] if self.base else []),
            *([self.chosen] if self.chosen and not self.chosen_on_front else []),
            *(t for t in self.front if not t.is_baseline),
        ]
        names = self.study.objectives
        return [
            Beside(
                trial=t,
                kind=self.kind(t),
                ratios={n: "" if t is self.base else ratio(values(t).get(n), base.get(n)) for n in names},
            )
            for t in rows
        ]

    def points(self, x: str, y: str, href: Callable[[Trial], str]) -> list[Point]:
        """Every completed trial that has both measurements, with its knobs and numbers as words.

        Where many trials are off the front these are bare dots, and the front's words are fewer.
        """
        kinds = {t.id: "front" for t in self.front}
        crowd = len(self.trials) - len(kinds) > MARKED
        found = []
        for trial in self.trials:
            numbers = values(trial)
            if trial.state is not TrialState.COMPLETE or x not in numbers or y not in numbers:
                continue
            kind = kinds.get(trial.id, "other")
            if trial.is_baseline or trial.number == self.winner:
                kind = self.kind(trial)
            if kind == "other" and crowd:
                found.append(Point(x=numbers[x], y=numbers[y], kind=kind))
                continue
            whole = kind in ("baseline", "winner") or (kind == "front" and not crowd)
            label = self._words(trial, kind, numbers) if whole else _short(trial, x, y)
            place = {"x": numbers[x], "y": numbers[y]}
            found.append(Point(**place, kind=kind, label=label, href=href(trial), front=trial.id in kinds))
        return found

    def _words(self, trial: Trial, kind: str, numbers: Mapping[str, float]) -> str:
        name = {"baseline": " (baseline)", "winner": " (winner)"}.get(kind, "")
        told = [f"{n} {measured(n, numbers[n])}" for n in self.columns if n in numbers]
        return "\n".join([f"trial {trial.number}{name}: {knobs(trial.candidate)}", *told])


def _short(trial: Trial, x: str, y: str) -> str:
    numbers = values(trial)
    told = "\n".join(f"{name} {measured(name, numbers[name])}" for name in (x, y))
    return f"trial {trial.number}: {knobs(trial.candidate)}\n{told}"


def values(trial: Trial | None) -> Mapping[str, float]:
    """What the search saw of a trial; empty for none."""
    return trial.measurement.values if trial is not None and trial.measurement else {}


def board(study: Study, trials: Sequence[Trial], runs: Sequence[Run]) -> Board:
    """Sorts out a study. `runs` are its runs, the newest first."""
    run = next((r for r in runs if r.summary), None)
    winner = run.summary.get("winner") if run else None
    return Board(
        study=study,
        trials=tuple(trials),
        base=next((t for t in reversed(trials) if t.is_baseline and t.measurement), None),
        front=pareto.front(trials, study.objectives),
        winner=winner if isinstance(winner, int) else None,
        run=run,
    )
