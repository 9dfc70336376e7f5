"""The pages of docs/reference/, made from the code: `python -m benchmarks.site.reference FOLDER` writes them.

`make docs` makes them anew each time (benchmarks/site/hooks.py), so none of them lies in the tree.
"""

import ast
import inspect
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from benchmarks.site.environment import VARIABLES
from tuner.cli import app
from tuner.doctor import EXIT_CODES as DOCTOR
from tuner.engine.failures import KINDS, retries
from tuner.errors import EXIT_CODES
from tuner.measures import MEASURES, Measure
from tuner.profiles.export import FORMATS, render
from tuner.records import Candidate, Profile, ProfileKey
from tuner.replay.plan import PLANS, Plan
from tuner.settings import shipped
from tuner.tuning import study, survey

WIDTH = 100
CLIENT = "tuner"


def pages() -> dict[str, str]:
    """File name → text of every generated page."""
    makers: dict[str, Callable[[], str]] = {
        "cli.md": command_line, "study.md": study_file, "plans.md": plans, "measurements.md": measurements,
        "http.md": http, "metrics.md": metrics, "exit-codes.md": exit_codes, "environment.md": environment,
        "exports.md": exports, "failures.md": failures,
    }  # fmt: skip
    return {name: make() for name, make in makers.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines)


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", *parts)) + "\n"


def command_line() -> str:
    """What `--help` prints, of every command."""
    parts = [f"## {' '.join(words)}\n\n```text\n{said}```" for words, said in helps()]
    about = (
        "What `tuner COMMAND --help` (or `-h`) prints. Every command that reads takes `--json`. Results go to"
        " standard output, progress and messages to standard error. A table that is too wide for the terminal"
        " becomes a block of lines per row; in a pipe a row is one line. `--no-color` (or NO_COLOR=1) turns"
        ' colours off. For completion put `eval "$(tuner completion bash)"` into `~/.bashrc`, or run'
        " `tuner --install-completion`. [Exit codes](exit-codes.md) have a page of their own."
    )
    return _page("Commands", about, *parts)


def helps() -> Iterator[tuple[tuple[str, ...], str]]:
    """(words, help) of the program and each of its commands."""
    todo: list[tuple[tuple[str, ...], Any]] = [((CLIENT,), typer.main.get_command(app))]
    while todo:
        words, command = todo.pop(0)
        yield words, _help(words)
        inner = getattr(command, "commands", {})
        todo[:0] = [((*words, name), each) for name, each in inner.items() if not each.hidden]


def _help(words: Sequence[str]) -> str:
    typed = [*words[1:], "--help"]
    done = CliRunner().invoke(app, typed, prog_name=CLIENT, env={"COLUMNS": str(WIDTH), "NO_COLOR": "1"})
    if done.exit_code:
        raise RuntimeError(f"{' '.join(typed)}: {done.output}")
    return done.stdout.strip() + "\n"


LINE = re.compile(r"^( *)([\w]+):([^#]*)#? *(.*)$")


def meanings() -> dict[str, str]:
    """Key of a study file (`slo.ttft_ms`) → what tuner/data/study.yaml says of it."""
    found: dict[str, str] = {}
    above = ""
    for line in shipped("data", "study.yaml").read_text().splitlines():
        match = LINE.match(line)
        if match is None:
            raise ValueError(f"study.yaml: cannot read the line {line!r}")
        indent, key, _, words = match.groups()
        above = above if indent else key
        found[f"{above}.{key}" if indent else key] = words
    return found


SECTIONS: dict[str, type[BaseModel]] = {
    "engine": survey.EngineFile, "slo": study.SloFile, "quality": study.QualityFile,
    "budget": study.BudgetFile,
}  # fmt: skip


def study_file() -> str:
    """Every key with its default, its limits and its meaning."""
    about = (
        "A study file is YAML. This one has every key, each with a comment. Paths are relative to the file."
        " An"
        " unknown key is an error that names the nearest right one."
    )
    text = shipped("data", "study.yaml").read_text()
    rows = list(_keys(study.StudyFile, "", meanings()))
    hand = (
        "`slices` by hand is a list of `{start_s, duration_s, name, held_out}`; [Traffic](../traffic.md)"
        " says what"
        " `auto` takes. `plan` may change the numbers of a [plan](plans.md). What each sampler does is in"
        " [The search](../search.md); what a run does with all of this is in [How a run goes](../tuning.md)."
    )
    return _page(
        "Study file",
        about,
        f"```yaml\n{text}```",
        "## Keys",
        table(("key", "default", "limits", "meaning"), rows),
        hand,
    )


def _keys(model: type[BaseModel], above: str, said: dict[str, str]) -> Iterator[Sequence[str]]:
    for name, entry in model.model_fields.items():
        key = f"{above}{name}"
        yield f"`{key}`", "" if name in SECTIONS else _default(entry), _limits(entry), said[key]
        if not above and name in SECTIONS:
            yield from _keys(SECTIONS[name], f"{name}.", said)


def _default(entry: FieldInfo) -> str:
    if entry.is_required():
        return "must be given"
    value = entry.get_default(call_default_factory=True)
    return (
        "none"
        if value in (None, "")
        else f"`{value}`"
        if not isinstance(value, tuple)
        else f"`{list(value)}`"
    )


def _limits(entry: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "at least", "max_length": "at most"}
    bounds = [
        f"{sign} {_short(getattr(rule, name))}" for rule in _rules(entry) for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]  # fmt: skip
    length = any("at" in bound for bound in bounds)
    return ", ".join(bounds) + (" characters or entries" if length else "")


def _rules(entry: FieldInfo) -> Iterator[Any]:
    yield from entry.metadata
    for part in get_args(entry.annotation):
        yield from getattr(part, "__metadata__", ())


def _short(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def plans() -> str:
    """The plans' numbers side by side, and what each number is."""
    names = [name for name in Plan.__dataclass_fields__ if name not in ("name", "demonstration")]
    said = docstrings(Plan)
    settable = study.PlanFile.model_fields
    rows = [
        (
            f"`{name}`" if name in settable else name,
            *(_short(getattr(plan, name)) for plan in PLANS.values()),
            said[name],
        )
        for name in names
    ]
    about = (
        "`plan:` in a study file names one of these. The numbers in `code` can be changed, such as"
        " `plan: {base: standard, repeats: 2}`; they are part of the study's ID. `quick` is a"
        " demonstration, so do not act on its numbers. [Replay](../replay.md) says what happens in each"
        " phase."
    )
    return _page("Plans", about, table(("number", *PLANS, "meaning"), rows))


def docstrings(kind: type) -> dict[str, str]:
    """Field → the string that stands below it in the class."""
    (body,) = [
        node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)
    ]
    found: dict[str, str] = {}
    for field, text in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def measurements() -> str:
    """Every number, its unit, its direction, and what it needs to be an objective."""
    rows = [
        (f"`{name}`", entry.words, entry.unit, _better(entry), _objective(entry))
        for name, entry in MEASURES.items()
    ]
    about = (
        "Every number that a measurement can hold. Each of them may be used in `objectives`, `not_worse` and"
        " `winner: {weights: …}` of a [study file](study.md). The formulas are in"
        " [Replay](../replay.md#formulas). If the"
        " trace distinguishes requests, the name of a class comes first:"
        " `interactive.ttft_p95_ms`"
        " ([classes](../replay.md#classes-of-requests)). If an engine does not report a number, it is absent,"
        " never 0."
    )
    return _page(
        "Measurements and objectives", about, table(("name", "meaning", "unit", "better", "notes"), rows)
    )


def _better(entry: Measure) -> str:
    return "more" if entry.direction == "maximize" else "less"


def _objective(entry: Measure) -> str:
    needs = {"slo": "needs a limit under `slo`", "price_per_gpu_hour": "needs `price_per_gpu_hour`", None: ""}
    notes = [needs[entry.needs], f"limit: `slo.{entry.limit}`" if entry.limit else ""]
    notes.append("" if entry.predicted else "not predicted by the simulator")
    return "; ".join(note for note in notes if note)


def http() -> str:
    """Every route of the API with its parameters and refusals, from the OpenAPI document."""
    made = _service().openapi()
    rows = [
        (f"`{method.upper()} {path}`", about.get("summary", ""), _parameters(about), _answers(about))
        for path, methods in made["paths"].items()
        for method, about in methods.items()
    ]
    said = (
        "Every route. `GET /v1/openapi.json` of a running service describes the bodies, with examples."
        " [The service](../api.md) says who may do what, and how a pipeline pulls."
    )
    return _page("HTTP", said, table(("route", "what it does", "parameters", "answers"), rows))


def _parameters(about: dict[str, Any]) -> str:
    given = [f"`{one['name']}`" for one in about.get("parameters", ()) if one["in"] != "path"]
    return ", ".join([*given, *(["a body"] if "requestBody" in about else [])])


def _answers(about: dict[str, Any]) -> str:
    return ", ".join(sorted(about["responses"]))


def _service() -> Any:
    from tuner.history.store import Store
    from tuner.service.app import create
    from tuner.service.runner import Controllers
    from tuner.settings import Settings

    home = Path(tempfile.mkdtemp(prefix="tuner-docs-"))
    settings = Settings(home=home, database_url="", artifacts="")
    store = Store(settings.url, create=True)
    return create(store, settings, clock=_now, runner=Controllers(store, settings, _now))


def _now() -> datetime:
    return datetime.now(UTC)


def metrics() -> str:
    """Every metric of GET /metrics: of a service's own registry, without a value."""
    made = _service()
    made.build_middleware_stack()
    kinds = {"counter": "_total"}
    rows = [
        (f"`{found.name}{kinds.get(found.type, '')}`", found.type, _labels(found), found.documentation)
        for found in made.state.registry.collect()
    ]
    about = (
        "`GET /metrics` of `tuner serve`, for Prometheus. `deploy/monitoring` has a Grafana dashboard and"
        " alerts."
    )
    return _page("Metrics", about, table(("name", "type", "labels", "meaning"), sorted(rows)))


def _labels(found: Any) -> str:
    given = getattr(found, "_labelnames", None) or sorted(
        {name for one in found.samples for name in one.labels}
    )
    return ", ".join(f"`{name}`" for name in given)


def exit_codes() -> str:
    """Of all commands, then the doctor's."""
    codes = table(("code", "meaning"), ((code, words) for code, words in EXIT_CODES.items()))
    about = "Of `tuner doctor`: the first check that found an error. Warnings do not count."
    checks = ((code, f"[{name}](../troubleshooting.md#{anchor(name)})") for name, code in DOCTOR.items())
    return _page("Exit codes", codes, "## The doctor's", about, table(("code", "check"), checks))


def anchor(name: str) -> str:
    """The part of docs/troubleshooting.md about a check of the doctor."""
    return f"doctor-{name.replace(' ', '-')}"


def environment() -> str:
    """Every variable that the tuner reads."""
    parts = [
        f"## {title}\n\n{table(('variable', 'meaning'), rows.items())}" for title, rows in VARIABLES.items()
    ]
    return _page("Environment", "Every environment variable that the tuner reads.", *parts)


def exports() -> str:
    """One made-up profile in every format."""
    example = Profile(
        id=7, key=ProfileKey(model="Qwen/Qwen2.5-7B-Instruct", target="gpu-1", workload="chat"), version=3,
        candidate=Candidate({"max_num_seqs": 128, "max_num_batched_tokens": 4096}), engine_version="0.32.0",
        gpu_class="h100-80x1", study_id="3f2a9c01b7de", trial_id=17, argv=("--max-num-seqs", "128",
        "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching"), env={},
        evidence={"trial_number": 17, "confirmed": True}, digest="0f" * 32, created_at=_now(),
    )  # fmt: skip
    parts = [
        f"## {name}\n\n`{each.media}`\n\n```{_language(each.media)}\n{render(example, name)}```"
        for name, each in FORMATS.items()
    ]
    about = (
        "`tuner profile export ID --format FORMAT`, `tuner profile resolve … --format FORMAT` and"
        " `GET /v1/profiles/resolve?format=FORMAT` write the same text. [Profiles](../profiles.md#formats)"
        " says where each"
        " belongs. The profile shown here is made up."
    )
    return _page("Export formats", about, *parts)


def _language(media: str) -> str:
    return {"application/yaml": "yaml", "application/json": "json"}.get(media, "text")


def failures() -> str:
    """What each kind of failure means for a trial."""
    about = (
        "How a launch or a replay can fail. *infeasible*: the candidate is at fault, and the search learns"
        " from it. *aborted*: the candidate is not at fault, and the trial is repeated. *study*: no candidate"
        " can work, so the run stops with exit code 7. [Troubleshooting](../troubleshooting.md) says what to"
        " do; [The engine](../engine.md#failures) says how the tuner finds the cause, and when the study is"
        " at fault instead of a candidate."
    )
    rows = [
        (f"[{kind}](../troubleshooting.md#{kind})", each.sentence, _outcome(kind), _retries(kind))
        for kind, each in KINDS.items()
    ]
    return _page("Failure kinds", about, table(("kind", "what the tuner says", "outcome", "retries"), rows))


def _outcome(kind: str) -> str:
    return KINDS[kind].outcome + (
        "; infeasible once another candidate served" if KINDS[kind].by_candidate else ""
    )


def _retries(kind: str) -> str:
    start, load = retries(kind), retries(kind, "run")
    return str(start) if start == load else f"{start}; under load {load}"


def main() -> None:
    """Write every page into the folder that is given."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
