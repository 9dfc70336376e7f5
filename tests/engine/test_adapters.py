"""One record per kind of engine (tuner/adapters) that everybody reads; a further one is one file, as in
docs/extending.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tuner
from tests.engine.helpers import spec
from tuner import adapters
from tuner.engine import boots, failures, metrics
from tuner.engine.server import arguments
from tuner.errors import BadInput
from tuner.knobs.arguments import title
from tuner.records import EngineFacts
from tuner.tuning.survey import EngineFile, engine_command

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"
MADE_UP = next(part for part in DOCS.read_text().split("```") if "EngineAdapter(" in part).removeprefix(
    "python"
)


@pytest.fixture
def madeup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with one more file."""
    (tmp_path / "madeup.py").write_text(MADE_UP)
    monkeypatch.setattr(adapters, "__path__", [*adapters.__path__, str(tmp_path)])
    adapters.adapters.cache_clear()
    yield
    adapters.adapters.cache_clear()


def test_22_a_further_engine_is_one_file(madeup: None, tmp_path: Path) -> None:
    """Study file, command, environment, metrics, failures and sentences follow from the record."""
    assert list(adapters.adapters()) == ["vllm", "madeup", "simulated"]
    python = tmp_path / "python"
    python.touch()
    asked = EngineFile(kind="madeup", python=str(python))
    assert engine_command(asked, tmp_path) == (str(python), "-m", "madeup.server")
    assert adapters.adapter_in(engine_command(asked, tmp_path)).kind == "madeup"
    launch = spec(tmp_path, command=("docker", "{env}", "python"), kind="madeup")
    assert "MADEUP_QUIET" in arguments(launch, 1, "nonce")
    said = metrics.parse(
        'madeup_running 3\nmadeup_preempted_total 2\nmadeup_config{block="16"} 1\n', "madeup"
    )
    assert (said["running"], said["preemptions"], said["waiting"]) == (3.0, 2.0, None)
    assert said.config == {"block": "16"}
    ended = failures.classify("ERROR card is full", 1, "startup", engine="madeup")
    assert (ended.kind, ended.outcome) == ("oom", "infeasible")
    ended = failures.classify("ValueError: there is no such model", 1, "startup", engine="madeup")
    assert (ended.kind, ended.outcome) == ("model_missing", "study")
    assert failures.classify("torch.OutOfMemoryError: x", 1, "startup", engine="madeup").kind == "crashed"
    assert boots.cache_environment(tmp_path, "madeup") == {}
    assert not adapters.adapter_of("madeup").live_knobs
    facts = EngineFacts(kind="madeup", version="3.1", platform="cuda", flags=frozenset())
    assert title(facts) == "Made-up 3.1"


def test_22_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput, match=r"no engine is named 'vlm'.*vllm"):
        adapters.adapter_of("vlm")
    with pytest.raises(ValueError, match="Input should be 'vllm' or 'simulated', not 'vlm'"):
        EngineFile(kind="vlm", python="/python")


def test_22_only_the_adapters_tell_engines_apart() -> None:
    """No other file compares a kind of engine with a name, or lists the names."""
    root, kinds, found = Path(tuner.__file__).parent, set(adapters.adapters()), []
    for path in sorted(root.rglob("*.py")):
        if path.parent.name == "adapters":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.expr):
                continue
            parts: list[ast.expr] = []
            if isinstance(node, ast.Compare) and "kind" in ast.unparse(node):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if any(isinstance(part, ast.Constant) and part.value in kinds for part in parts):
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not found


def test_22_the_failure_table_knows_every_kind_that_an_engine_tells() -> None:
    for adapter in adapters.adapters().values():
        assert set(adapter.failures) <= set(failures.KINDS)
        assert set(adapter.metrics) <= set(metrics.SERIES)
