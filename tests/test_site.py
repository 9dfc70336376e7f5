"""The documentation site: its pages made from code are whole, and every part of the product has an entry."""

import ast
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
import yaml

from benchmarks.site.environment import VARIABLES
from benchmarks.site.reference import anchor, docstrings, helps, meanings, pages
from tests.test_documented_commands import BLOCK
from tuner.cli import app, main
from tuner.commands.study import why
from tuner.doctor import EXIT_CODES as DOCTOR
from tuner.engine.failures import KINDS
from tuner.errors import EXIT_CODES, StudyFailed, TunerError, page_of
from tuner.measures import MEASURES
from tuner.profiles.export import FORMATS
from tuner.records import Candidate, Trial
from tuner.replay.plan import Plan
from tuner.settings import shipped
from tuner.tuning import study, survey

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TROUBLE = (DOCS / "troubleshooting.md").read_text()
CODE = {path: path.read_text() for path in (ROOT / "tuner").rglob("*.py")}


class _Plain(yaml.SafeLoader):
    """YAML with the tags of mkdocs left out."""


def navigation() -> list[str]:
    found: list[str] = []

    def walk(part: object) -> None:
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict):
            for value in part.values():
                walk(value)
        elif isinstance(part, list):
            for each in part:
                walk(each)

    walk(yaml.load((ROOT / "mkdocs.yml").read_text(), _Plain)["nav"])
    return found


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def test_every_entry_of_the_navigation_is_a_page_and_no_reference_is_left_out(made: dict[str, str]) -> None:
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | {f"reference/{n}" for n in made}
    listed = navigation()
    assert len(listed) == len(set(listed))
    assert set(listed) - written == {"index.md"}  # made of the README
    assert {
        page for page in written - set(listed) if page.startswith(("reference/", "start/", "how-to/"))
    } == set()


def test_the_get_started_pages_lead_from_one_to_the_next() -> None:
    start = [page for page in navigation() if page.startswith("start/")]
    assert len(start) == 4
    for page, following in zip(start, [*start[1:], "../how-to/"], strict=True):
        assert f"]({following.removeprefix('start/')}" in (DOCS / page).read_text().rpartition("Next:")[2]
    assert "no GPU is needed" in (DOCS / start[0]).read_text()


def test_the_reference_has_every_command_with_its_help(made: dict[str, str]) -> None:
    named = {" ".join(words) for words, _ in helps()}
    root = typer.main.get_command(app)
    assert {f"tuner {name}" for name in getattr(root, "commands", {})} <= named
    for words, said in helps():
        assert f"## {' '.join(words)}\n\n```text\n{said}```" in made["cli.md"]
        assert said.startswith(f"Usage: {' '.join(words)}")


def test_the_reference_has_every_key_of_a_study_file_with_its_meaning(made: dict[str, str]) -> None:
    said = meanings()
    assert all(said.values()), [key for key, words in said.items() if not words]
    top = set(study.StudyFile.model_fields)
    assert {key for key in said if "." not in key} == top
    for section, model in (
        ("engine", survey.EngineFile),
        ("slo", study.SloFile),
        ("quality", study.QualityFile),
        ("budget", study.BudgetFile),
    ):
        assert {key.partition(".")[2] for key in said if key.startswith(f"{section}.")} == set(
            model.model_fields
        )
    for key, words in said.items():
        assert f"| `{key}` |" in made["study.md"]
        assert words.replace("|", "\\|") in made["study.md"]


def test_the_study_with_every_key_is_a_study(made: dict[str, str]) -> None:
    text = shipped("data", "study.yaml").read_text()
    assert study.parse(text, name="study.yaml").engine.kind == "vllm"
    assert text in made["study.md"]


def test_every_number_of_a_plan_is_explained(made: dict[str, str]) -> None:
    said = docstrings(Plan)
    assert set(Plan.__dataclass_fields__) == set(said)
    assert set(study.PlanFile.model_fields) - {"base"} <= set(said)
    for name in study.PlanFile.model_fields:
        assert name == "base" or f"| `{name}` |" in made["plans.md"]


def test_measurements_exports_exit_codes_and_failures_are_all_there(made: dict[str, str]) -> None:
    assert [name for name in MEASURES if f"| `{name}` |" not in made["measurements.md"]] == []
    assert [name for name in FORMATS if f"## {name}\n" not in made["exports.md"]] == []
    assert [
        code for code in (*EXIT_CODES, *DOCTOR.values()) if f"| {code} |" not in made["exit-codes.md"]
    ] == []
    assert [kind for kind in KINDS if f"#{kind})" not in made["failures.md"]] == []


def test_every_exit_code_of_an_error_has_a_meaning() -> None:
    found, todo = set(), [TunerError]
    while todo:
        error = todo.pop()
        found.add(error.exit_code)
        todo += error.__subclasses__()
    assert found <= set(EXIT_CODES)


def test_every_route_and_metric_is_there(made: dict[str, str]) -> None:
    routes = re.findall(r"^\| `([A-Z]+) (/\S+)`", made["http.md"], re.MULTILINE)
    assert ("GET", "/v1/profiles/resolve") in routes
    assert len(routes) > 30
    named = set(re.findall(r'"(tuner_[a-z_]+)"', CODE[ROOT / "tuner/service/metrics.py"]))
    shown = set(re.findall(r"^\| `(tuner_[a-z_]+)`", made["metrics.md"], re.MULTILINE))
    assert named <= shown | {name.removesuffix("_total") for name in shown}


def test_every_variable_that_the_code_names_is_there() -> None:
    named = {name for text in CODE.values() for name in re.findall(r"\bTUNER_[A-Z][A-Z_]*[A-Z]\b", text)}
    listed = {name for rows in VARIABLES.values() for name in rows}
    assert {name for name in named if f"`{name}`" not in listed} - {"TUNER_CAPTURE"} == set()


def entries() -> set[str]:
    return set(re.findall(r"^### (\S+)$", TROUBLE, re.MULTILINE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_has_an_entry_with_the_sentence_that_is_printed(kind: str) -> None:
    assert kind in entries()
    part = TROUBLE.partition(f"### {kind}\n")[2].partition("\n#")[0]
    assert part.startswith(f"> {KINDS[kind].sentence}\n"), part[:80]
    assert len(part.split("\n\n", 1)[1]) > 20


FAILING = {"Aborted", "Infeasible", "StudyFailed", "EngineError"}


def causes_raised() -> set[str]:
    """The causes that the code gives to its errors by name."""
    calls = (
        node
        for text in CODE.values()
        if "cause=" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    )
    return {
        word.value.value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in FAILING
        for word in call.keywords
        if word.arg == "cause" and isinstance(word.value, ast.Constant) and isinstance(word.value.value, str)
    }


def test_every_other_cause_and_every_check_has_an_entry() -> None:
    causes = causes_raised()
    assert {"gate", "sender", "disk"} & causes
    assert causes - entries() == set()
    assert {anchor(name) for name in DOCTOR} <= entries()


def test_every_yaml_block_is_yaml_and_every_study_is_one() -> None:
    studies = 0
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for language, text in BLOCK.findall(page.read_text()):
            if language != "yaml":
                continue
            found = yaml.safe_load(text)
            assert found is not None, page
            if isinstance(found, dict) and {"name", "model", "trace", "space"} <= set(found):
                study.parse(text, name=page.name)
                studies += 1
    assert studies >= 1


def test_the_site_loads_nothing_over_the_network_and_breaks_no_link() -> None:
    """`make docs` builds with these settings; the hook looks at what was built."""
    found = yaml.load((ROOT / "mkdocs.yml").read_text(), _Plain)
    assert found["strict"] is True
    assert found["theme"]["font"] is False
    assert {found["validation"][name] for name in ("not_found", "anchors", "unrecognized_links")} == {"warn"}
    assert found["hooks"] == ["benchmarks/site/hooks.py"]


@pytest.mark.parametrize(
    "symptom", sorted({*KINDS, *causes_raised(), *(f"doctor-{name}" for name in DOCTOR)})
)
def test_the_page_that_is_printed_with_a_failure_has_its_entry(symptom: str) -> None:
    page = re.fullmatch(r" \(docs/troubleshooting\.md#(\S+)\)", page_of(symptom))
    assert page is not None
    assert page[1] in entries()
    assert page_of(None) == ""


def test_a_failed_trial_a_command_and_the_doctor_print_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    trial = Trial(id=1, study_id="s", run_id="r", number=1, candidate=Candidate(), started_at=at)
    trial = replace(trial, cause="oom", reason="out of memory")
    assert why(trial) == f"oom: out of memory{page_of('oom')}"
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.argv", ["tuner", "doctor"])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr()
    assert page_of("doctor-home") in told.out + told.err

    def fails(**_: object) -> None:
        raise StudyFailed("the engine lacks a Python package: xyz", cause="package")

    monkeypatch.setattr("tuner.cli.app", fails)
    with pytest.raises(SystemExit, match="7"):
        main()
    assert page_of("package") in capsys.readouterr().err
