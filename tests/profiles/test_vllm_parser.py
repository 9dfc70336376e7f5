"""The exported YAML means to the real vLLM's parser what the arguments mean. No engine starts."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.profiles.test_export import a_profile
from tuner.profiles.export import render

pytestmark = pytest.mark.vllm

CASES = {
    "switches": ("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager"),
    "switches on": ("--enable-prefix-caching", "--enable-chunked-prefill"),
    "numbers": (
        "--max-num-seqs",
        "128",
        "--gpu-memory-utilization",
        "0.85",
        "--max-num-batched-tokens=8192",
        "--block-size",
        "32",
        "--kv-cache-memory-bytes",
        "1073741824",
        "--num-gpu-blocks-override",
        "640",
        "--long-prefill-token-threshold",
        "512",
    ),
    "words": ("--scheduling-policy", "priority", "--dtype", "auto", "--max-model-len", "8k"),
    "json": (
        "--compilation-config",
        '{"mode": 3, "cudagraph_capture_sizes": [1, 2]}',
    ),
    "list": ("--cudagraph-capture-sizes", "1", "2", "4"),
    "empty": (),
}


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What the target's parser makes of each case, as arguments and as YAML; asked once for all."""
    python = os.environ.get("TUNER_TEST_VLLM", "")
    if not Path(python).exists():
        pytest.fail("TUNER_TEST_VLLM names no interpreter that has vLLM: run make test-vllm")
    folder = tmp_path_factory.mktemp("yaml")
    questions: dict[str, list[str]] = {}
    for name, argv in CASES.items():
        file = folder / f"{name}.yaml"
        file.write_text(render(a_profile(argv, {}), "vllm-yaml"))
        questions[f"{name} argv"] = ["--model", "m", *argv]
        questions[f"{name} yaml"] = ["--model", "m", "--config", str(file)]
    told = subprocess.run(
        [python, str(Path(__file__).parent / "vllm_parse.py")],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    found: dict[str, dict[str, str]] = json.loads(told.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_yaml_and_arguments_parse_alike(parsed: dict[str, dict[str, str]], name: str) -> None:
    assert parsed[f"{name} yaml"] == parsed[f"{name} argv"]


def test_every_case_changes_something(parsed: dict[str, dict[str, str]]) -> None:
    default = parsed["empty argv"]
    assert all(parsed[f"{name} yaml"] != default for name in CASES if name != "empty")
    assert parsed["switches yaml"]["enable_prefix_caching"] == "False"
