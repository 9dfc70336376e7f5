"""The workbench: the table of all trials of a study, which can be sorted and filtered. Its address holds its
whole state.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import Query
from markupsafe import Markup

from tuner.errors import BadInput, nearest
from tuner.measures import NAMES, many
from tuner.records import Trial
from tuner.report import words
from tuner.report.board import Board, values
from tuner.report.charts import Cloud, Point, bars, parallel, scatter
from tuner.report.effects import doubt, effects
from tuner.report.trial_table import as_csv, as_json, as_parquet, table_of
from tuner.service.pages.render import PageNumber, Text, marked, measurement

PAGE = 100
PICTURES = 32
MOST_TERMS = 20
"""Most terms of `where`, because each term reads every trial."""
KNOBS_SHOWN = 5
"""Number of changed knobs that are columns if no columns were chosen."""
PLAIN = ("state", "origin", "cause", "reason", "gpu_seconds", "attempt", "started_at")
"""Columns of a trial that are neither knob nor measurement."""
OPERATORS: Mapping[str, Callable[[pa.ChunkedArray, object], pa.ChunkedArray]] = {
    "<=": pc.less_equal, ">=": pc.greater_equal, "!=": pc.not_equal, "=": pc.equal, "<": pc.less,
    ">": pc.greater,
}  # fmt: skip
TERM = re.compile(r"([A-Za-z_][\w.]*)(<=|>=|!=|=|<|>|~)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchQuery:
    """The address of a table of trials.

    `where` holds terms such as `state=COMPLETE ttft_p95_ms<300`, separated by blanks; all of them must be
    true. A word alone is searched in all texts. `sort` is a column, with `-` before it for the largest first.
    `columns` are the shown columns (empty: the usual ones). `picked` are the trials with a tick.
    """

    where: Annotated[str, Query(max_length=2000)] = ""
    sort: Text = "-number"
    columns: Annotated[tuple[str, ...], Query(alias="col", max_length=60)] = ()
    x: Text = ""
    y: Text = ""
    page: PageNumber = 1
    picked: Annotated[tuple[int, ...], Query(alias="pick", max_length=60)] = ()

    def address(self, **changes: object) -> str:
        """The query string of this view with some parts changed."""
        asked = replace(self, **changes)  # type: ignore[arg-type]
        pairs: list[tuple[str, object]] = [
            (name, value) for name, value in (("where", asked.where), ("x", asked.x), ("y", asked.y)) if value
        ]
        pairs += [("sort", asked.sort)] if asked.sort != "-number" else []
        pairs += [("col", name) for name in asked.columns] + [("pick", n) for n in asked.picked]
        pairs += [("page", asked.page)] if asked.page > 1 else []
        return "?" + urlencode(pairs)


@dataclass(frozen=True)
class Bench:
    """A study's trials as one table, made once after each change of the history."""

    board: Board
    rows: Sequence[Trial]
    table: pa.Table
    effects_of: dict[str, tuple[str, Markup]] = field(default_factory=dict)
    pictures: dict[tuple[object, ...], tuple[Markup, Markup]] = field(default_factory=dict)
    """The drawings of front and lines, kept by what they show. Another order or page does not need a new
    drawing.
    """
    marks: dict[tuple[object, ...], list[Point]] = field(default_factory=dict)
    """The named marks of the front, by axes and trials with a tick. They do not depend on the filter."""

    @cached_property
    def names(self) -> list[str]:
        """The columns that can be shown: first objectives, then changed knobs, then all others."""
        ours = [n for n in self.board.study.objectives if n in self.table.column_names]
        rest = [
            n for n in self.table.column_names if n not in ours and n not in ("number", "screened", "kind")
        ]
        return [*ours, *sorted(rest, key=lambda name: (not name.startswith("knob."), name in PLAIN, name))]

    @cached_property
    def turned(self) -> list[str]:
        """The knobs that have more than one value."""
        knobs = [name for name in self.table.column_names if name.startswith("knob.")]
        return [name for name in knobs if pc.count_distinct(self.table[name], mode="all").as_py() > 1]

    @cached_property
    def tried_again(self) -> bool:
        """Whether a trial has several attempts. Each attempt is a row."""
        return any(t.attempt for t in self.rows)

    @cached_property
    def usual(self) -> tuple[str, ...]:
        ours = [n for n in self.board.study.objectives if n in self.table.column_names]
        more = [n for n in ("slo_attainment",) if n in self.table.column_names and n not in ours]
        return (*ours, *more, *self.turned[:KNOBS_SHOWN])

    def column(self, name: str) -> str:
        """A column by its name; a knob may be given without `knob.`. BadInput names the nearest column."""
        for found in (name, f"knob.{name}"):
            if found in self.table.column_names:
                return found
        known = [n.removeprefix("knob.") for n in self.table.column_names]
        raise BadInput(f"there is no column '{name}'{nearest(name, known)}")

    @cached_property
    def texts(self) -> list[str]:
        """The texts in which a word alone is searched."""
        return [
            " ".join(
                (
                    t.label,
                    t.state.value,
                    t.origin,
                    words.knobs(self.board.configuration(t)),
                    t.cause or "",
                    t.reason or "",
                )
            ).lower()
            for t in self.rows
        ]

    def chosen(self, where: str) -> pa.Array:
        """For each row, whether it matches all terms. BadInput for a term that cannot be read."""
        terms = where.split()
        if len(terms) > MOST_TERMS:
            raise BadInput(f"{len(terms)} terms; at most {MOST_TERMS} can be combined")
        mask = pa.array([True] * len(self.rows), pa.bool_())
        for term in terms:
            mask = pc.and_(mask, self._term(term))
        return mask

    def _term(self, term: str) -> pa.Array:
        found = TERM.fullmatch(term)
        if found is None:
            return pa.array([term.lower() in text for text in self.texts], pa.bool_())
        name, sign, text = found.groups()
        column = self.table[self.column(name)].combine_chunks()
        if sign == "~":
            return pc.fill_null(
                pc.match_substring(pc.cast(column, pa.string()), text, ignore_case=True), False
            )
        value: object = text
        if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            column, value = pc.cast(column, pa.float64()), _number(term, text)
        elif pa.types.is_boolean(column.type):
            value = text.lower() == "true"
        else:
            column = pc.cast(column, pa.string())
        return pc.fill_null(OPERATORS[sign](column, value), sign == "!=")

    def ordered(self, asked: BenchQuery) -> list[int]:
        """The matching rows in their order, by their place in the table."""
        name = self.column(asked.sort.removeprefix("-"))
        way = "descending" if asked.sort.startswith("-") else "ascending"
        order = pc.sort_indices(self.table, sort_keys=[(name, way)])
        kept = pc.filter(order, pc.take(self.chosen(asked.where), order))
        found: list[int] = kept.to_pylist()
        return found

    def importance(self, metric: str) -> tuple[str, Markup]:
        """(the reason if there are no shares, the shares as bars) for one measurement."""
        if metric not in self.effects_of:
            found = effects(self.board.trials, metric)
            why = doubt(found)
            drawn = "" if why else bars({e.knob: round(e.share * 100, 1) for e in found[:8]}, "%")
            self.effects_of[metric] = why, marked(drawn)
        return self.effects_of[metric]


def _number(term: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"'{term}': a number is expected after the sign") from None


def bench_of(board: Board) -> Bench:
    """The table of trials of a study."""
    rows = sorted(board.trials, key=lambda t: (t.number, t.attempt))
    return Bench(board=board, rows=rows, table=table_of(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One row as it is shown."""

    trial: Trial
    kind: str
    cells: Sequence[tuple[str, str]]
    ticked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchView:
    """The table as it was asked for. `found` of the `whole` rows match; `axes` are the drawn measurements."""

    asked: BenchQuery
    shown: Sequence[str]
    names: Sequence[str]
    rows: Sequence[BenchRow]
    found: int
    whole: str
    pages: int
    axes: tuple[str, str]
    measured: Sequence[str]
    front: Markup
    lines: Markup

    def sorted_by(self, name: str) -> str:
        """`aria-sort` of a column's head."""
        return {name: "ascending", f"-{name}": "descending"}.get(self.asked.sort, "none")

    def by(self, name: str) -> str:
        """The address that sorts by a column; if it is already sorted by it, in reverse order."""
        return self.asked.address(sort=name if self.asked.sort == f"-{name}" else f"-{name}", page=1)


def view(bench: Bench, asked: BenchQuery, link: Callable[[Trial], str]) -> BenchView:
    """What the table shows. BadInput for columns, terms or axes that do not exist."""
    board = bench.board
    shown = [bench.column(name) for name in asked.columns] or list(bench.usual)
    order = bench.ordered(asked)
    pages = max(1, -(-len(order) // PAGE))
    page = min(max(1, asked.page), pages)
    axes = _axes(bench, asked)
    rows = [bench.rows[place] for place in order[(page - 1) * PAGE : page * PAGE]]
    what = (asked.where, axes, asked.picked, *shown)
    drawn = bench.pictures.get(what)
    if drawn is None:
        places = sorted(order)
        drawn = _front(bench, places, axes, asked.picked, link), _lines(bench, places, shown)
        if len(bench.pictures) >= PICTURES:
            bench.pictures.clear()
        bench.pictures[what] = drawn
    return BenchView(
        asked=replace(asked, page=page),
        shown=shown,
        names=bench.names,
        rows=[_row(board, trial, shown, asked.picked) for trial in rows],
        found=len(order),
        whole=many(len(bench.rows), "attempt" if bench.tried_again else "trial", ",.0f"),
        pages=pages,
        axes=axes,
        measured=[name for name in bench.names if name in NAMES],
        front=drawn[0],
        lines=drawn[1],
    )


def _axes(bench: Bench, asked: BenchQuery) -> tuple[str, str]:
    ours = [*bench.board.study.objectives, *bench.board.study.objectives]
    return measurement(asked.x or ours[0]), measurement(asked.y or ours[1])


def _row(board: Board, trial: Trial, shown: Sequence[str], picked: Sequence[int]) -> BenchRow:
    return BenchRow(
        trial=trial,
        kind=board.kind(trial),
        cells=[(name, _cell(trial, name)) for name in shown],
        ticked=trial.number in picked,
    )


def _cell(trial: Trial, name: str) -> str:
    if name.startswith("knob."):
        value = trial.candidate.get(name.removeprefix("knob."))
        return "–" if value is None else str(value)
    if name in PLAIN:
        found = getattr(trial, name)
        return words.number(found) if isinstance(found, float) else str(getattr(found, "value", found) or "–")
    return words.number(values(trial).get(name))


def _front(
    bench: Bench,
    order: Sequence[int],
    axes: tuple[str, str],
    picked: Sequence[int],
    link: Callable[[Trial], str],
) -> Markup:
    """The front in two measurements: the matching trials, the other trials in a faint colour, the SLO,
    labels, and the noise between launches.
    """
    board, (x, y) = bench.board, axes
    if x not in bench.table.column_names or y not in bench.table.column_names:
        return marked(scatter([], x, y))
    marks = bench.marks.get((axes, picked))
    if marks is None:
        marks = board.marked_points(x, y, link, also=picked)
        bench.marks.clear()
        bench.marks[axes, picked] = marks
    drawn = scatter(marks, x, y, clouds=_clouds(bench, order, x, y), guides=board.guides(x, y), brush=True)
    return marked(drawn)


def _clouds(bench: Bench, order: Sequence[int], x: str, y: str) -> list[Cloud]:
    xs, ys = (bench.table[name].to_numpy() for name in (x, y))
    done = pc.equal(bench.table["state"], "COMPLETE").to_numpy()
    kept = np.zeros(len(done), bool)
    kept[np.asarray(order, int)] = True
    named = [("faint", done & ~kept, "trials that are filtered out"), ("chosen", done & kept, "trials")]
    return [
        Cloud(kind=kind, x=xs[at], y=ys[at], title=f"{int(at.sum())} {text}")
        for kind, at, text in named
        if at.any()
    ]


MOST_LINES = 400
"""The most lines of the parallel coordinates. If more trials are chosen, this many are taken from them at
equal distances.
"""


def _lines(bench: Bench, order: Sequence[int], shown: Sequence[str]) -> Markup:
    """Parallel coordinates over the shown columns in which trials differ."""
    step = max(1, -(-len(order) // MOST_LINES))
    chosen = order[::step]
    columns = {name: bench.table[name].take(pa.array(chosen, pa.int64())).to_pylist() for name in shown}
    kinds = [bench.board.kind(bench.rows[place]) for place in chosen]
    return marked(parallel(columns, kinds))


FILES: Mapping[str, tuple[str, Callable[[pa.Table], bytes]]] = {
    "csv": ("text/csv", as_csv),
    "parquet": ("application/vnd.apache.parquet", as_parquet),
    "json": ("application/json", as_json),
}
"""Downloads by file ending: media type, and the function that writes them."""


def download(bench: Bench, asked: BenchQuery, ending: str) -> tuple[bytes, str]:
    """(the chosen trials in their order as a file, its media type). BadInput for an unknown ending."""
    if ending not in FILES:
        raise BadInput(f"'{ending}' is not one of {', '.join(FILES)}{nearest(ending, FILES)}")
    media, write = FILES[ending]
    return write(bench.table.take(pa.array(bench.ordered(asked), pa.int64()))), media
