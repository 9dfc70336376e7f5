"""What three charts make of their values, by the facts of their public templates.

production-stack: helm/templates/deployment-vllm-multi.yaml. llm-d-modelservice: templates/_helpers.tpl, and
the defaults of values.yaml. KServe: config/llmisvcconfig/config-llm-template.yaml.
"""

import shlex
from typing import Any

STACK = (
    ("maxModelLen", "--max-model-len"),
    ("dtype", "--dtype"),
    ("tensorParallelSize", "--tensor-parallel-size"),
    ("maxNumSeqs", "--max-num-seqs"),
    ("gpuMemoryUtilization", "--gpu_memory_utilization"),
    ("maxLoras", "--max_loras"),
    ("runner", "--runner"),
    ("convert", "--convert"),
)


def go(value: object) -> str:
    """A value as Helm's `quote` writes it: numbers are floats, with an exponent from a million on."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and abs(value) >= 10**6:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e+{int(exponent):02}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def kubernetes(words: list[str]) -> list[str]:
    """`$$(` is `$(` to a container."""
    return [word.replace("$$(", "$(") for word in words]


def production_stack(values: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    spec = values["servingEngineSpec"]["modelSpec"][0]
    config = spec.get("vllmConfig") or {}
    words = ["vllm", "serve", spec["modelURL"], "--host", "0.0.0.0", "--port", "8000"]
    env = {"PYTHONHASHSEED": "123", "HF_HOME": "/tmp"}
    if config:
        if "enableChunkedPrefill" in config:
            words.append(f"--{'' if config['enableChunkedPrefill'] else 'no-'}enable-chunked-prefill")
        words.append(f"--{'' if config.get('enablePrefixCaching') else 'no-'}enable-prefix-caching")
        for key, flag in STACK:
            words += [flag, go(config[key])] if key in config else []
        words += [go(word) for word in config.get("extraArgs") or []]
        if str(config.get("v0")) == "1":
            env["VLLM_USE_V1"] = "0"
        else:
            env["PROMETHEUS_MULTIPROC_DIR"] = "/tmp"
    env |= {item["name"]: item["value"] for item in spec.get("env", [])}
    return kubernetes(words), env


def llm_d(values: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    decode = values["decode"]
    sizes = {"tensor": 1, "data": 1, "dataLocal": 1, "workers": 1, **decode.get("parallelism", {})}
    container = decode["containers"][0]
    assert container["modelCommand"] == "vllmServe"
    artifacts = values["modelArtifacts"]
    words = ["vllm", "serve", artifacts["uri"].removeprefix("hf://"), "--port", "8200"]
    for key, flag in (("tensor", "tensor"), ("data", "data"), ("dataLocal", "data")):
        suffix = "-local" if key == "dataLocal" else ""
        words += [f"--{flag}-parallel-size{suffix}", str(sizes[key])] if sizes[key] > 1 else []
    words += ["--served-model-name", artifacts["name"], *container.get("args", [])]
    env = {item["name"]: item["value"] for item in container.get("env", [])}
    gpus = str(sizes["dataLocal"] * sizes["tensor"])
    return kubernetes(words), {**env, "GPUS": gpus}


def kserve(values: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    spec = values["spec"]
    env = {item["name"]: item["value"] for item in spec["template"]["containers"][0]["env"]}
    env = {name: kubernetes([value])[0] for name, value in env.items()}
    tensor = spec.get("parallelism", {}).get("tensor")
    script = f"vllm serve /mnt/models --served-model-name {spec['model']['name']} --port 8000"
    script += " --disable-access-log-for-endpoints /health,/metrics,/ping --shutdown-timeout 15"
    script += f" --tensor-parallel-size {tensor}" if tensor else ""
    return shlex.split(f"{script} {env.pop('VLLM_ADDITIONAL_ARGS')}"), env
