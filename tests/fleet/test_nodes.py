"""Which nodes are meant, and what a node says of itself."""

from pathlib import Path

import pytest

from tests.tuning.studies import STUDY
from tuner.errors import BadInput, NotFound
from tuner.fleet.nodes import chosen, fingerprint, register, selector
from tuner.history.store import Store
from tuner.knobs.discover import facts_of_version
from tuner.records import Node
from tuner.tuning.study import parse
from tuner.tuning.survey import EngineFile, Surveyed, named

CLUSTER = {
    "a": {"name": "a", "host": "h1", "gpu": "a100-80", "zone": "east"},
    "b": {"name": "b", "host": "h1", "gpu": "a100-40", "zone": "west"},
    "c": {"name": "c", "host": "h2", "gpu": "rtx-a4500-20x2", "class": "rtx-a4500-20x2"},
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(f"sqlite:///{tmp_path / 'tuner.db'}")
    found.upgrade()
    return found


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        ([], "abc"),
        (["all"], "abc"),
        (["gpu=a100"], "ab"),
        (["gpu=A100-80"], "a"),
        (["gpu=a4500"], "c"),
        (["class=rtx-a4500-20x2"], "c"),
        (["gpu=a100,zone=west"], "b"),
        (["gpu=a100", "zone=east"], "a"),
        (["host=h2"], "c"),
        (["name=b"], "b"),
    ],
)
def test_a_selector_takes_whole_words_of_a_gpu_and_whole_values_of_all_else(
    texts: list[str], names: str
) -> None:
    assert chosen(CLUSTER, selector(texts)) == tuple(names)


@pytest.mark.parametrize("text", ["a100", "gpu=", "=a100", "gpu=a100,east"])
def test_what_is_no_selector_is_told(text: str) -> None:
    with pytest.raises(BadInput, match="is not KEY=VALUE"):
        selector([text])


def test_an_unknown_label_is_told_with_the_nearest_one() -> None:
    with pytest.raises(BadInput, match=r"no node has a label 'zon' \(did you mean 'zone'\?\)"):
        chosen(CLUSTER, selector(["zon=east"]))


def test_where_nothing_is_selected_the_answer_says_what_there_is() -> None:
    with pytest.raises(NotFound, match=r"gpu=h100 selects none .* a \(gpu=a100-80 host=h1 zone=east\)"):
        chosen(CLUSTER, selector(["gpu=h100"]))


def test_part_of_a_word_is_not_the_gpu() -> None:
    with pytest.raises(NotFound):
        chosen(CLUSTER, selector(["gpu=a10"]))


def test_a_simulated_node_is_its_card() -> None:
    engine = EngineFile(kind="simulated", card="a4500")
    found = fingerprint("small", engine, base=Path("."), labels={"zone": "east"})
    assert (found.node.name, found.node.gpu_class) == ("small", "sim-a4500")
    assert found.node.labels == {"zone": "east"}
    assert found.node.host
    assert found.facts.kind == "simulated"


def test_what_is_new_of_a_node_is_written_and_its_state_stays(store: Store) -> None:
    register(store, Node(name="a", gpu_class="a100x1", labels={"zone": "east"}))
    store.set_node_state("a", "dirty")
    kept = register(store, Node(name="a", gpu_class="a100x1", driver="570.1", labels={"rack": "7"}))
    assert (kept.state, kept.driver, kept.labels) == ("dirty", "570.1", {"zone": "east", "rack": "7"})
    assert store.node("a") == kept


def test_another_machine_under_a_known_name_is_refused(store: Store) -> None:
    register(store, Node(name="a", gpu_class="a100x1"))
    with pytest.raises(BadInput, match="was registered with a100x1, but now it has h100x8"):
        register(store, Node(name="a", gpu_class="h100x8"))


def test_a_node_s_study_is_not_run_on_a_host_without_its_gpus(store: Store) -> None:
    store.add_node(Node(name="gpu-1", gpu_class="h100-80x2", gpus=("GPU-a", "GPU-b"), host="far"))
    file = parse(STUDY.replace("trace:", "node: gpu-1\ntrace:"), name="study.yaml")
    facts = facts_of_version("0.32.0")

    def on(*gpus: str) -> Surveyed:
        here = Node(name="local", gpu_class="h100-80x2", gpus=gpus)
        return named(file.node, Surveyed(command=(), facts=facts, node=here), store)

    assert on("GPU-a", "GPU-b", "GPU-c").node.gpus == ("GPU-a", "GPU-b")
    with pytest.raises(BadInput, match=r"node: gpu-1 has GPU GPU-b, .* Run this command on host far"):
        on("GPU-a", "GPU-c")
