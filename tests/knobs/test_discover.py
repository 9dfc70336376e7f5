"""Asking an interpreter, against packages named vllm whose truth is known, in processes of their own."""

import json
import sys
from pathlib import Path

import pytest

from tuner.errors import BadInput
from tuner.knobs.arguments import known_violation
from tuner.knobs.discover import GpuKind, discover, facts_of_version, interpreter_of, on_device

PYTHON = (sys.executable,)
ARG_UTILS = """
from dataclasses import dataclass
from typing import Optional
{poison}
@dataclass
class EngineArgs:
    max_num_seqs: Optional[int] = 77
    enforce_eager: bool = False

    def add_cli_args(parser):
        parser.add_argument("--max-num-seqs", type=int, default=77)
        parser.add_argument("--enforce-eager", **kwargs)

@dataclass
class AsyncEngineArgs(EngineArgs):
    pass
"""
CLI_ARGS = """
def make_arg_parser(parser):
    import argparse
    print("a library that talks on standard output")
    parser.add_argument("--max-num-seqs", type=int, default=55)
    parser.add_argument("--scheduling-policy", choices=["fcfs", "lottery"], default="fcfs")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    return parser
"""
PLATFORMS = """
class current_platform:
    is_cpu = staticmethod(lambda: True)
    is_cuda = is_rocm = is_xpu = is_tpu = staticmethod(lambda: False)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "home"))
    return tmp_path


def package(
    folder: Path, *, parser_module: str | None, maker: str | None, poison: str = ""
) -> dict[str, str]:
    """A package named vllm with the parser and its maker in those modules; returns the environment for it."""
    files = {
        "__init__.py": "",
        "_version.py": "version: str\n__version__ = version = '0.31.7'\n",
        "platforms.py": PLATFORMS,
        "engine/__init__.py": "",
        "engine/arg_utils.py": ARG_UTILS.format(poison=poison),
    }
    if parser_module:
        files[parser_module] = "from argparse import ArgumentParser as FlexibleArgumentParser\n"
    if maker:
        files[maker] = CLI_ARGS
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("parser_module", "maker"),
    [
        ("utils.py", "entrypoints/openai/cli_args.py"),
        ("utils/argparse_utils.py", "entrypoints/launchers/cli_args.py"),
        ("utils/argparse_utils.py", "entrypoints/common/cli_args.py"),
    ],
)
def test_the_parser_is_found_wherever_a_release_keeps_it(home: Path, parser_module: str, maker: str) -> None:
    env = package(home, parser_module=parser_module, maker=maker)
    facts = discover((*PYTHON, "-m", "vllm.entrypoints.openai.api_server"), env=env)
    assert facts.version == "0.31.7"
    assert facts.platform == "cpu"
    named = {"--max-num-seqs", "--scheduling-policy", "--enforce-eager", "--no-enforce-eager"}
    assert facts.flags >= named
    assert facts.defaults["max_num_seqs"] == 55
    assert facts.choices["scheduling_policy"] == ("fcfs", "lottery")


def test_without_a_parser_the_dataclass_answers(home: Path) -> None:
    facts = discover(PYTHON, env=package(home, parser_module=None, maker=None))
    assert facts.flags == {"--max-num-seqs", "--no-enforce-eager", "--enforce-eager"}
    assert facts.defaults["max_num_seqs"] == 77


def test_without_an_import_the_source_answers(home: Path) -> None:
    env = package(home, parser_module=None, maker=None, poison="raise RuntimeError('no device')")
    facts = discover(PYTHON, env=env)
    assert facts.flags == {"--max-num-seqs", "--no-enforce-eager", "--enforce-eager"}
    assert facts.defaults["max_num_seqs"] == 128


def test_the_answer_is_kept_until_the_package_changes(home: Path) -> None:
    env = package(home, parser_module="utils.py", maker="entrypoints/openai/cli_args.py")
    assert discover(PYTHON, env=env).defaults["max_num_seqs"] == 55
    kept = list((home / "home" / "cache" / "engines").glob("*.json"))
    assert len(kept) == 1
    answer = json.loads(kept[0].read_text())
    answer["defaults"]["max_num_seqs"] = 56
    kept[0].write_text(json.dumps(answer))
    assert discover(PYTHON, env=env).defaults["max_num_seqs"] == 56
    (home / "vllm" / "_version.py").write_text("__version__ = version = '0.31.8'\n")
    assert discover(PYTHON, env=env).defaults["max_num_seqs"] == 55
    kept[0].write_text("half a fi")
    assert discover(PYTHON, env=env).version == "0.31.8"


def test_an_interpreter_without_vllm_is_named(home: Path) -> None:
    with pytest.raises(BadInput, match=r"no package named vllm; name the interpreter that has vLLM"):
        discover((*PYTHON, "-S", "-I", "-c"))


def test_what_is_no_interpreter_is_named(home: Path) -> None:
    with pytest.raises(BadInput, match="/nowhere/python"):
        discover(("/nowhere/python",))
    with pytest.raises(BadInput, match="/bin/ls is not a usable Python interpreter"):
        discover(("/bin/ls",))


def test_the_simulated_engine_is_asked_for_its_own_flags(home: Path) -> None:
    facts = discover((*PYTHON, "-m", "tuner.simulator.app"))
    assert facts.kind == "simulated"
    assert facts.version == "0.32.0"
    assert {"--max-num-seqs", "--no-enable-prefix-caching"} <= facts.flags


def test_a_prefix_stays_before_the_interpreter() -> None:
    command = ("docker", "run", "image", "python3", "-m", "vllm.entrypoints.openai.api_server")
    assert interpreter_of(command) == ("docker", "run", "image", "python3")


DEFAULTS = [
    ("0.32.0", GpuKind(name="NVIDIA B200", memory_gib=178), 1024, 16384, 0.92),
    ("0.27.1", GpuKind(name="NVIDIA B200", memory_gib=178), 1024, 8192, 0.92),
    ("0.32.0", GpuKind(name="NVIDIA H100 80GB HBM3", memory_gib=79.2), 1024, 8192, 0.92),
    ("0.13.0", GpuKind(name="NVIDIA H100 80GB HBM3", memory_gib=79.2), 1024, 8192, 0.9),
    ("0.32.0", GpuKind(name="NVIDIA A100-SXM4-80GB", memory_gib=79.2), 256, 2048, 0.92),
    ("0.32.0", GpuKind(name="NVIDIA L40S", memory_gib=44.4), 256, 2048, 0.92),
]


@pytest.mark.parametrize(("version", "gpu", "seqs", "tokens", "share"), DEFAULTS)
def test_defaults_follow_the_card_and_the_release(
    version: str, gpu: GpuKind, seqs: int, tokens: int, share: float
) -> None:
    defaults = on_device(facts_of_version(version), "cuda", gpu).defaults
    assert defaults["max_num_seqs"] == seqs
    assert defaults["max_num_batched_tokens"] == tokens
    assert defaults["gpu_memory_utilization"] == share


def test_a_default_that_needs_the_card_is_unknown_without_one() -> None:
    defaults = facts_of_version("0.32.0").defaults
    assert "max_num_seqs" not in defaults
    assert defaults["block_size"] == 16
    assert known_violation({"max_num_scheduled_tokens": 4096}, facts_of_version("0.32.0")) is None


def test_defaults_on_cpu() -> None:
    defaults = facts_of_version("0.32.0", "cpu").defaults
    assert (defaults["max_num_seqs"], defaults["max_num_batched_tokens"], defaults["block_size"]) == (
        128,
        2048,
        128,
    )
    assert "async_scheduling" not in defaults
