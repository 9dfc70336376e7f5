"""The report: one HTML file that needs no network, or Markdown, from stored records alone; and the page of
`trace show --html`.
"""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from numpy.typing import NDArray

from tuner import masking
from tuner.conclusions import Attribution, Conclusion
from tuner.measures import direction_of, many
from tuner.records import JsonObject, Launch, Profile, Run, RunState, Study, Trial
from tuner.report import evidence, words
from tuner.report.board import Board, beliefs, board, failures, spent, warnings, worst_lateness
from tuner.report.card import knob_text, row_text
from tuner.report.charts import Curve, Panel, bars, curves, fitted, from_zero, levels, panels
from tuner.report.effects import Effect, better, doubt, effects
from tuner.settings import runnable
from tuner.traffic.statistics import CAPACITIES, Statistics, series
from tuner.traffic.structure import reuse_by_capacity
from tuner.traffic.trace import Trace

HERE = Path(__file__).parent
FILTERS = ("number", "measured", "knobs", "heading", "unit", "seconds", "took", "percent", "change",
           "difference", "headline", "outcome", "state", "trial_word", "saving", "step", "title")  # fmt: skip
"""What templates take from `words`."""
FRONT_CURVES = 2
SLICES = 3
ROWS = 400
"""The most trials in the list. For a larger study the list has the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The data of a report. `conclusions` are those of the study, the oldest first. `winner` is the profile
    of the winner, `attribution` what each of its knobs gives. `commands` show the study again. `runs` are the
    study's, the newest first, `stopped` the ids of `Store.stopped_runs`.
    """

    study: Study
    trials: Sequence[Trial]
    conclusions: Sequence[Conclusion]
    launches: Sequence[Launch]
    commands: Sequence[str]
    generated_at: datetime
    winner: Profile | None = None
    attribution: Attribution | None = None
    runs: Sequence[Run] = ()
    stopped: Collection[str] = ()


def render(data: ReportData) -> str:
    """The HTML text. Failed requests count as infinite latency and are written as ∞."""
    return environment(html=True).get_template("report.html.j2").render(_context(data, _Pictures(data)))


def markdown(data: ReportData) -> str:
    """The same in Markdown, without pictures."""
    return environment(html=False).get_template("report.md.j2").render(_context(data, None))


def environment(*, html: bool) -> Environment:
    """What templates of this folder are rendered with."""
    found = Environment(
        loader=FileSystemLoader(HERE), autoescape=html, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    for name in FILTERS:
        found.filters[name] = getattr(words, name)
    if html:
        found.filters["knobs"] = knobs
    found.filters |= {"many": many, "cell": cell, "row_text": row_text, "knob_text": knob_text}
    found.filters["runnable"] = runnable
    return found


def breakable(text: object) -> Markup:
    """Names of knobs and measurements that may be broken at their underscores, rather than anywhere."""
    return escape(text).replace("_", Markup("_<wbr>"))


def knobs(candidate: Mapping[str, object]) -> Markup:
    """A candidate in the words of the command line, broken between knobs rather than in them."""
    one = Markup('<span class="knob">{}</span>')
    each = [one.format(breakable(words.knobs({name: value}))) for name, value in candidate.items()]
    return Markup(" ").join(each) or escape(words.knobs({}))


def cell(text: object) -> str:
    """Text that cannot break out of a Markdown table's cell, nor start markup."""
    plain = " ".join(str(text).split())
    for sign in "\\`*_[]<>|#":
        plain = plain.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return plain


def _context(data: ReportData, pictures: "_Pictures | None") -> Mapping[str, object]:
    found = pictures.board if pictures else board(data.study, data.trials, data.conclusions, data.attribution)
    believed = beliefs(data.study, found.trials, data.launches)
    return {
        "study": data.study,
        "board": found,
        "confirmation": found.confirmation,
        "links": {"trial": "#trial-", "download": "", "profile": ""},
        "commands": data.commands,
        "generated_at": data.generated_at.strftime("%Y-%m-%d %H:%M UTC"),
        "directions": {name: direction_of(name) for name in data.study.objectives},
        "counts": words.told_counts(found.trials, data.stopped),
        "spent": spent(found.trials, data.launches),
        "unended": words.unended(next(iter(data.runs), None), data.stopped),
        "stopped": data.stopped,
        "failures": failures(found.trials, data.launches),
        "beliefs": believed,
        "warnings": warnings(believed),
        "worst_late": worst_lateness(believed),
        "effects": {name: effects(found.trials, name) for name in data.study.objectives},
        "better": better,
        "doubt": doubt,
        "listed": found.trials[-ROWS:],
        "whose_file": _whose_file(data),
        "study_file": yaml.safe_dump(masking.tree(_spec(data)), sort_keys=False, allow_unicode=True),
        "serve": serve_command(data.winner),
        "pictures": pictures,
        "style": Markup((HERE / "style.css").read_text(encoding="utf-8")),
        "script": Markup((HERE / "report.js").read_text(encoding="utf-8")),
    }


def serve_command(winner: Profile | None) -> str:
    """The command that serves a profile; empty without one."""
    if winner is None:
        return ""
    env = [f"{name}={value}" for name, value in sorted(winner.env.items())]
    words = ["vllm", "serve", winner.key.model, *winner.argv]
    return shlex.join([*(["env", *env] if env else []), *words])


def _ended(data: ReportData) -> list[Run]:
    return [run for run in data.runs if run.state is not RunState.RUNNING]


def _whose_file(data: ReportData) -> str:
    """What the report says of `_spec`: whose study file it is."""
    return "of the last run that ended" if _ended(data) else "of the run that has not ended"


def _spec(data: ReportData) -> JsonObject:
    """The study file of the last run that ended; while none has, the one with which the first run began."""
    changes = _ended(data)[0].summary.get("study_file") if _ended(data) else None
    return {**data.study.spec, **(changes if isinstance(changes, dict) else {})}


class _Pictures:
    """The drawings of one report, made when the template asks for them."""

    def __init__(self, data: ReportData) -> None:
        self.board: Board = board(data.study, data.trials, data.conclusions, data.attribution)
        self._data = data

    @cached_property
    def fronts(self) -> list[Markup]:
        found = self.board
        href = _anchors(found)
        return [Markup(found.drawing(x, y, href)) for x, y in found.pairs]

    @cached_property
    def chosen(self) -> list[Trial]:
        """The trials with curves: the baseline, the winner and the first of the front."""
        found = self.board
        winner = [found.chosen] if found.chosen else []
        rest = [t for t in found.front if not t.is_baseline and t.number != found.winner][:FRONT_CURVES]
        return [*([found.base] if found.base else []), *winner, *rest]

    @cached_property
    def latencies(self) -> list[tuple[str, Markup]]:
        return [(name, Markup(text)) for name, text in evidence.latencies(self.named)]

    @cached_property
    def timelines(self) -> list[tuple[str, Markup]]:
        return [(name, Markup(text)) for name, text in evidence.timelines(self.named[:2])]

    @cached_property
    def named(self) -> list[evidence.Named]:
        return evidence.named(self.board, self.chosen)

    def importance(self, found: Sequence[Effect]) -> Markup:
        """The share of a measurement's differences that each knob explains, as bars."""
        return Markup(bars({e.knob: round(e.share * 100, 1) for e in found[:8]}, "%"))

    def slices(self, found: Sequence[Effect]) -> list[tuple[str, Markup]]:
        """A chart per knob, for the knobs that explain most."""
        return [(e.knob, Markup(levels(e.levels, e.metric, e.knob))) for e in found[:SLICES]]

    def seconds(self, values: Mapping[str, float]) -> Markup:
        """GPU seconds as bars."""
        return Markup(bars(values, "gpu_seconds"))


def _anchors(found: Board) -> Callable[[Trial], str]:
    listed = {t.id for t in found.trials[-ROWS:]}
    return lambda trial: f"#trial-{trial.number}" if trial.id in listed else ""


STEPS = 120
"""Points of a cumulative curve."""
STRIPS = (
    ("request_rps", "requests/s"),
    ("input_tokens_per_s", "prompt tokens/s"),
    ("output_tokens_per_s", "answer tokens/s"),
    ("concurrency", "requests in flight"),
)


def trace_page(trace: Trace, numbers: Statistics, name: str) -> str:
    """The page; `numbers` are the trace's."""
    return (
        environment(html=True)
        .get_template("trace.html.j2")
        .render(
            name=name,
            digest=trace.digest,
            numbers=numbers,
            style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
            over_time=Markup(_over_time(trace)),
            lengths=Markup(_cumulative({"prompt": trace.input_len, "answer": trace.output_len}, "tokens")),
            gaps=Markup(_cumulative({"between arrivals": np.diff(trace.arrival_s) * 1e3}, "milliseconds")),
            reuse=Markup(_reuse(trace)),
            table=_table(numbers),
        )
    )


def _over_time(trace: Trace) -> str:
    drawn = series(trace)
    strips = [
        Panel(
            name=said,
            style="steps" if key == "concurrency" else "bars",
            x=drawn["start_s"],
            y=drawn[key],
            kind="winner" if key == "concurrency" else "front",
        )
        for key, said in STRIPS
    ]
    return panels(strips, "seconds of trace time", trace.duration_s, "The trace over time")


def _cumulative(found: Mapping[str, NDArray[np.generic]], unit: str) -> str:
    """The share of values up to a size, one line per name. Values up to zero are left out: the axis is
    logarithmic.
    """
    shares = np.linspace(0.0, 1.0, STEPS + 1)
    kinds = ("winner", "baseline")
    lines = []
    for kind, (name, values) in zip(kinds, found.items(), strict=False):
        every = values.astype(np.float64)
        shown = every[every > 0]
        if len(shown):
            x = np.quantile(shown, shares).tolist()
            lines.append(Curve(name=name, kind=kind, x=x, y=shares.tolist()))
    sizes = [x for line in lines for x in line.x]
    return curves(lines, fitted(unit, sizes or [0.0]), from_zero("share", [1.0]), f"Share by {unit}")


def _reuse(trace: Trace) -> str:
    if not len(trace.blocks):
        return (
            '<p class="none">The trace has no block ids, so it is not known which prompts share a prefix.</p>'
        )
    shares = reuse_by_capacity(trace, CAPACITIES)
    said = {"any size" if size is None else f"{size:,} tokens": share for size, share in shares.items()}
    return bars({size: 100 * share for size, share in said.items()}, "%")


def _table(numbers: Statistics) -> Sequence[tuple[str, Mapping[str, float]]]:
    rows = (
        ("prompt tokens", numbers.input_len),
        ("answer tokens", numbers.output_len),
        ("declared max_tokens", numbers.max_tokens),
        (f"requests in flight ({numbers.concurrency_source})", numbers.concurrency),
        ("observed TTFT, ms", numbers.observed_ttft_ms),
        ("observed end to end, ms", numbers.observed_e2e_ms),
    )
    return [(name, values) for name, values in rows if values]
