"""The suite over the fault engine (on its best behaviour) and the simulated engine."""

import sys
from pathlib import Path

import pytest

from tests.engine.conformance import Conformance, Deaths, Refusals
from tests.engine.helpers import spec
from tuner.records import LaunchSpec

SIMULATED = (sys.executable, "-m", "tuner.simulator.app")


class Fault:
    @classmethod
    def launch(cls, directory: Path, *argv: str) -> LaunchSpec:
        healthy = spec(directory)
        return spec(directory, argv=(*healthy.argv, *argv))


class Simulated:
    @classmethod
    def launch(cls, directory: Path, *argv: str) -> LaunchSpec:
        return spec(
            directory,
            command=SIMULATED,
            model="Qwen/Qwen2.5-7B-Instruct",
            argv=("--max-num-seqs", "16", "--max-model-len", "2048", *argv),
            env={"TUNER_SIM_CARD": "h100-80"},
            ready_timeout_s=60.0,
        )


class TestFaultEngine(Fault, Conformance, Refusals):
    pass


class TestFaultEngineDies(Fault, Deaths):
    pass


class TestSimulatedEngine(Simulated, Conformance, Refusals):
    pass


class TestSimulatedEngineDies(Simulated, Deaths):
    pass


@pytest.mark.parametrize("engine", [Fault, Simulated])
def test_both_are_launched_by_the_same_argv(engine: type[Fault] | type[Simulated], tmp_path: Path) -> None:
    assert "--port" not in engine.launch(tmp_path).argv
