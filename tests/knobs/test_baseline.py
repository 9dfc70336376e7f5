"""What runs today, read from wherever it is written down."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.knobs.conftest import engine
from tuner.errors import BadInput
from tuner.knobs.arguments import compile_candidate, fixed
from tuner.knobs.manifests import read, sources
from tuner.knobs.space import load
from tuner.records import Candidate, Value

KNOBS = Candidate({"enable_prefix_caching": False, "gpu_memory_utilization": 0.88, "max_num_seqs": 128})
FLAGS = "--max-num-seqs 128 --gpu-memory-utilization=0.88 --no-enable-prefix-caching --max-model-len 16384"

LINES = [
    f"vllm serve org/model {FLAGS}",
    f"/opt/venv/bin/vllm serve org/model --port 8000 --host 0.0.0.0 {FLAGS}",
    f"python3 -m vllm.entrypoints.openai.api_server --model org/model {FLAGS}",
    f"root  4711  3.2  1.0 99999 8888 ?  Sl  10:00  1:23 /bin/python3 /usr/bin/vllm serve org/model {FLAGS}",
    f"docker run --gpus all -p 8000:8000 --ipc=host vllm/vllm-openai:v0.32.0 --model org/model {FLAGS}",
    f"bash -c 'exec vllm serve org/model {FLAGS} 2>&1 | tee log'",
    f"VLLM_LOGGING_LEVEL=INFO vllm serve org/model {FLAGS} && echo done",
    "vllm serve org/model \\\n  " + FLAGS.replace(" --", " \\\n  --"),
    f"--model org/model {FLAGS}",
    f"vllm serve org/model {FLAGS.replace('num-seqs', 'num_seqs')}",
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line(line: str) -> None:
    made = read(line)
    assert made.model == "org/model"
    assert made.candidate == KNOBS.with_values(max_model_len=16384)


def test_what_is_read_compiles_to_what_was_written() -> None:
    study = read(LINES[0]).study()
    again = (*compile_candidate(study["baseline"], engine()).argv, *fixed(study["engine"]["args"], engine()))
    assert sorted(again) == sorted(FLAGS.replace("=", " ").split())


def test_values_in_every_spelling_of_vllm() -> None:
    made = read(
        "vllm serve m -tp 2 -O3 --max-num-batched-tokens 8K --max-model-len 10k --kv-offloading-size 16 "
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3 "
        "--cudagraph-capture-sizes 1 2 4 --enable-chunked-prefill=False --device-memory-utilization 0.8 "
        "--trust-remote-code --seed 7 --hf-overrides '{\"a\": [1]}'"
    )
    assert made.candidate == Candidate(
        {
            "tensor_parallel_size": 2,
            "optimization_level": 3,
            "max_num_batched_tokens": 8192,
            "max_model_len": 10000,
            "preemption": "offload:16",
            "speculative_config": '{"method":"ngram","num_speculative_tokens":3}',
            "cudagraph_capture_sizes": "[1,2,4]",
            "enable_chunked_prefill": False,
            "gpu_memory_utilization": 0.8,
        }
    )
    assert made.args == {"trust-remote-code": True, "seed": 7, "hf-overrides": '{"a":[1]}'}


def test_one_cuda_graph_size_is_the_largest_and_several_are_all() -> None:
    one, all_of_them = (
        read("vllm serve m --cuda-graph-sizes 1024"),
        read("vllm serve m --cuda-graph-sizes 1 2 4"),
    )
    assert one.candidate == Candidate({"max_cudagraph_capture_size": 1024})
    assert all_of_them.candidate == Candidate({"cudagraph_capture_sizes": "[1,2,4]"})


def test_swapping_of_old_engines_is_read() -> None:
    made = read("VLLM_USE_V1=0 vllm serve m --preemption-mode swap --swap-space 8")
    assert made.candidate == Candidate({"preemption": "swap:8"})
    assert made.env == {"VLLM_USE_V1": "0"}


def test_the_study_keeps_fixed_what_the_space_does_not_turn() -> None:
    made = read(f"vllm serve org/model {FLAGS} --dtype bfloat16 --watermark 0.1")
    assert made.study() == {
        "model": "org/model",
        "baseline": {**KNOBS, "watermark": 0.1},
        "engine": {"args": {"dtype": "bfloat16", "max-model-len": 16384}},
    }
    assert made.study(load("demo")) == {
        "model": "org/model",
        "baseline": {"gpu_memory_utilization": 0.88, "max_num_seqs": 128},
        "engine": {
            "args": {
                "dtype": "bfloat16",
                "enable-prefix-caching": False,
                "max-model-len": 16384,
                "watermark": 0.1,
            }
        },
    }


def test_a_shortened_flag_is_taken_as_vllm_takes_it_and_said() -> None:
    made = read("vllm serve m --max-num-seq 12 --kv-cache-memory 1073741824")
    assert made.candidate == Candidate({"max_num_seqs": 12, "kv_cache_memory_bytes": 1073741824})
    assert made.notes == (
        "--max-num-seq is short for --max-num-seqs. Write the whole name; another release may have two such"
        " flags",
    )


def test_secrets_stay_where_they_are() -> None:
    made = read("HF_TOKEN=hf_abc VLLM_LOGGING_LEVEL=INFO vllm serve m --api-key sk-1")
    assert made.env == {"VLLM_LOGGING_LEVEL": "INFO"}
    assert "sk-1" not in repr(made)
    assert "hf_abc" not in repr(made)
    assert made.notes == (
        "--api-key is set by the tuner for every launch",
        "HF_TOKEN is a secret and is not imported",
    )


def test_a_config_file_is_read_below_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: org/model\nmax-num-seqs: 8\nblock_size: 32\nno-enable-prefix-caching: true\n")
    made = read(f"vllm serve --config {config} --max-num-seqs 16")
    assert made.model == "org/model"
    assert made.candidate == Candidate({"max_num_seqs": 16, "block_size": 32, "enable_prefix_caching": False})
    assert read("vllm serve m --config /nowhere.yaml").notes == (
        "--config /nowhere.yaml cannot be read here, so its settings are missing",
    )


UNIT = """
[Unit]
Description=vLLM
[Service]
User=vllm
Environment="HF_HOME=/srv/hf" VLLM_USE_V1=1
EnvironmentFile=/etc/default/vllm
ExecStart=/opt/vllm/bin/vllm serve org/model \\
    --max-num-seqs 128 --gpu-memory-utilization 0.88 \\
    --no-enable-prefix-caching
Restart=always
"""
PRODUCTION_STACK = """
servingEngineSpec:
  runtimeClassName: ""
  modelSpec:
    - name: chat
      repository: vllm/vllm-openai
      modelURL: org/model
      requestGPU: 1
      vllmConfig:
        enablePrefixCaching: false
        maxNumSeqs: 128
        gpuMemoryUtilization: 0.88
        maxModelLen: 16384
        extraArgs: ["--disable-log-stats", "--kv-cache-dtype auto"]
      env:
        - {name: HF_HOME, value: /data}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: s, key: k}}}
"""
LLM_D = """
modelArtifacts: {uri: "hf://org/model"}
decode:
  parallelism: {tensor: 2}
  containers:
    - name: vllm
      image: ghcr.io/llm-d/llm-d-cuda:v0.4
      modelCommand: vllmServe
      args: ["--max-num-seqs", "128", "--gpu-memory-utilization=0.88", "--no-enable-prefix-caching"]
prefill:
  containers:
    - {name: vllm, modelCommand: vllmServe, args: ["--max-num-seqs", "16"]}
"""
KSERVE = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: chat}
spec:
  predictor:
    model:
      modelFormat: {name: vllm}
      storageUri: hf://org/model
      args: ["--max-num-seqs=128", "--gpu-memory-utilization=0.88"]
      env: [{name: VLLM_ADDITIONAL_ARGS, value: "--no-enable-prefix-caching"}]
"""
KSERVE_LLM = """
apiVersion: serving.kserve.io/v1alpha2
kind: LLMInferenceService
metadata: {name: chat}
spec:
  model: {uri: "hf://org/model", name: org/model}
  parallelism: {tensor: 2}
  template:
    containers:
      - name: main
        env:
          - name: VLLM_ADDITIONAL_ARGS
            value: "--max-num-seqs 128 --gpu-memory-utilization 0.88 --no-enable-prefix-caching"
"""
DEPLOYMENT = """
apiVersion: v1
kind: Service
metadata: {name: chat}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  template:
    spec:
      containers:
        - name: engine
          image: vllm/vllm-openai:v0.32.0
          command: ["/bin/sh", "-c"]
          args:
            - exec vllm serve $(MODEL) --max-num-seqs ${SEQS} --gpu-memory-utilization 0.88
              --no-enable-prefix-caching
          env: [{name: MODEL, value: org/model}, {name: SEQS, value: "128"}]
        - {name: sidecar, image: nginx}
"""
FILES: list[tuple[str, str, str | None, dict[str, Any]]] = [
    ("vllm.service", UNIT, None, {}),
    ("production-stack.yaml", PRODUCTION_STACK, None, {"max_model_len": 16384, "kv_cache_dtype": "auto"}),
    ("llm-d.yaml", LLM_D, "decode", {"tensor_parallel_size": 2}),
    ("kserve.yaml", KSERVE, None, {}),
    ("kserve-llm.yaml", KSERVE_LLM, None, {"tensor_parallel_size": 2}),
    ("deployment.yaml", DEPLOYMENT, None, {}),
]


@pytest.mark.parametrize(("name", "text", "pick", "more"), FILES)
def test_a_file(tmp_path: Path, name: str, text: str, pick: str | None, more: dict[str, Any]) -> None:
    path = tmp_path / name
    path.write_text(text)
    made = read(str(path), pick=pick)
    assert made.model == "org/model"
    assert made.candidate == KNOBS.with_values(**more)
    assert made.source == str(path)


def test_what_a_file_leaves_out_is_said(tmp_path: Path) -> None:
    unit, chart = tmp_path / "v.service", tmp_path / "values.yaml"
    unit.write_text(UNIT)
    chart.write_text(PRODUCTION_STACK)
    made = read(str(unit))
    assert made.env == {"HF_HOME": "/srv/hf", "VLLM_USE_V1": "1"}
    assert made.notes == ("EnvironmentFile /etc/default/vllm is not read; give its variables",)
    assert read(str(chart)).args == {"disable-log-stats": True}
    assert read(str(chart)).notes == (
        "HF_TOKEN comes from elsewhere in the cluster and is left out",
        "vLLM gets '--kv-cache-dtype auto' as one argument; write each word as an item",
    )


def test_of_several_engines_one_is_picked(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(LLM_D)
    assert [source.name for source in sources(str(path))] == ["decode", "prefill"]
    with pytest.raises(BadInput, match="pick one engine of decode, prefill"):
        read(str(path))
    with pytest.raises(BadInput, match="did you mean 'prefill'"):
        read(str(path), pick="prefil")
    assert read(str(path), pick="prefill").candidate == Candidate({"max_num_seqs": 16})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "vllm serve m --max-nmu-seqs 3",
            r"no vLLM has the argument --max-nmu-seqs \(did you mean '--max-num-seqs'",
        ),
        ("vllm serve m --max-num-seqs many", "--max-num-seqs: vLLM cannot read 'many' as a number"),
        ("vllm serve m --max-num-seqs", "--max-num-seqs has no value"),
        ("vllm serve m --gpu-memory-utilization 9", "9.0 is above 1"),
        ("vllm serve m --speculative-config {", "is not JSON"),
        ("nginx -g off", "no vLLM is started there"),
        ("vllm serve 'm", "cannot be split into words"),
        ("missing.yaml", "there is no file missing.yaml"),
        ("/etc/vllm/start.sh", "there is no file /etc/vllm/start.sh"),
        ("", "it is empty"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read(text)


def test_files_without_an_engine_are_refused(tmp_path: Path) -> None:
    other, broken, unit = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.service"
    other.write_text("kind: Service\nmetadata: {name: x}\n")
    broken.write_text("a: [1\nb: 2")
    unit.write_text("[Service]\nUser=x\n")
    said = {
        other: "this is Kubernetes: Service, and it starts no vLLM",
        broken: "line 2: not YAML",
        unit: "no ExecStart",
    }
    for path, says in said.items():
        with pytest.raises(BadInput, match=says):
            read(str(path))


def test_a_flag_that_the_engine_lacks_is_refused() -> None:
    with pytest.raises(BadInput, match="no vLLM has the argument --swap-space"):
        read("vllm serve m --swap-space 4", facts=engine("0.32.0"))
    assert yaml.safe_dump(read(LINES[0], facts=engine("0.32.0")).study())


@pytest.mark.parametrize(
    ("flag", "good", "bad"),
    [
        ("--max-num-seqs", {"64": 64, "1_000": 1000, " 64 ": 64, "+64": 64},
         ("1e3", "0x40", "64.0", "1k", "1K", "90%", "", " ", "1 0", "1__0")),
        ("--max-num-batched-tokens", {"8192": 8192, "8k": 8000, "1.5k": 1500, " 8K ": 8192, "1_000": 1000},
         ("1e4", "1.5K", "8kb", "8 k", "")),
        ("--max-model-len", {"16k": 16000, "16K": 16384, "25.6k": 25600}, ("1e4", "4.5K", "none", "")),
        ("--kv-cache-memory-bytes", {"8G": 2**33, "1.5g": 1_500_000_000}, ("1e9", "8.5G", "8GiB")),
        ("--gpu-memory-utilization", {".9": 0.9, "9e-1": 0.9, " 0.9 ": 0.9, "1": 1.0},
         ("90%", "0.9k", "0,9", "", "nan", "inf", "1e999")),
        ("--cudagraph-capture-sizes", {"+8": "[8]"}, ("1e1", "8k", "[1,2]", "1,2")),
        ("--kv-offloading-size", {"8": "offload:8", "1e1": "offload:10"}, ("8G", "many")),
    ],
)  # fmt: skip
def test_I29_2_an_import_takes_the_numbers_that_vllms_parser_takes(
    flag: str, good: dict[str, Value], bad: tuple[str, ...]
) -> None:
    """Each was tried on the parser of vLLM 0.32.0; `tuner lint` asks the same function."""
    for text, value in good.items():
        assert list(read(f"vllm serve m {flag} '{text}'").candidate.values()) == [value], text
    for text in bad:
        with pytest.raises(BadInput, match=rf"{flag}: vLLM cannot read '{re.escape(text)}' as a number"):
            read(f"vllm serve m {flag} '{text}'")


def test_I29_2_flags_that_are_no_knobs_take_the_same_numbers() -> None:
    for text in (
        "--seed 1e3",
        "--max-lora-rank 0x10",
        "--shutdown-timeout 10s",
        "--mm-processor-cache-gb 4G",
    ):
        with pytest.raises(BadInput, match=r"vLLM cannot read .* as a number"):
            read(f"vllm serve m {text}")
    made = read("vllm serve m --seed 1_000 --mm-processor-cache-gb 1e0 --max-lora-rank 16")
    assert made.args == {"seed": "1_000", "mm-processor-cache-gb": 1.0, "max-lora-rank": 16}


def test_I29_2_what_vllm_takes_for_not_given_is_not_given() -> None:
    made = read(
        "vllm serve m --kv-cache-memory-bytes '' --num-gpu-blocks-override None --kv-offloading-size ''"
    )
    assert (dict(made.candidate), dict(made.args)) == ({}, {})
    for text in ("auto", "AUTO", "-1"):
        made = read(f"vllm serve m --max-model-len {text}")
        assert (dict(made.candidate), dict(made.args)) == ({}, {"max-model-len": "auto"}), text


def test_I29_2_numbers_inside_an_object_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    made = read(
        "vllm serve m --kv-transfer-config.kv_buffer_size 5G --compilation-config.custom_ops+ none,+rms_norm"
    )
    assert json.loads(str(made.args["kv-transfer-config"])) == {"kv_buffer_size": 5 * 2**30}
    assert json.loads(str(made.args["compilation-config"])) == {"custom_ops": ["none", "+rms_norm"]}
    for name, text in (
        ("engine.yaml", "max-num-seqs: 1e3"),
        ("other.yaml", "max-num-batched-tokens: 8192.0"),
    ):
        (tmp_path / name).write_text(f"model: m\n{text}\n")
        with pytest.raises(BadInput, match="this flag takes a whole number"):
            read(f"vllm serve --config {tmp_path / name}")
