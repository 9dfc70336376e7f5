"""Ways in which people start vLLM, one of each kind: all of them say the same engine."""

# ruff: noqa: E501

from pathlib import Path

import pytest

from tuner.errors import BadInput
from tuner.knobs.manifests import read, sources
from tuner.records import Candidate

CASES = Path(__file__).parents[1] / "data" / "cases"
FLAGS = "--max-num-seqs 64 --gpu-memory-utilization 0.9"
SERVE = f"vllm serve org/model {FLAGS}"
MODULE = f"python3 -m vllm.entrypoints.openai.api_server --model org/model {FLAGS}"
IMAGE = "vllm/vllm-openai:v0.20.0"
SAID = Candidate({"max_num_seqs": 64, "gpu_memory_utilization": 0.9})

LINES = {
    "plain": SERVE,
    "module": MODULE,
    "python -u": MODULE.replace("python3", "python -u"),
    "a path of the module": f"python /opt/vllm/vllm/entrypoints/openai/api_server.py --model org/model {FLAGS}",
    "the old demo server": f"python -m vllm.entrypoints.api_server --model org/model {FLAGS}",
    "the cli's module": f"python -m vllm.entrypoints.cli.main serve org/model {FLAGS}",
    "path of the program": f"/opt/venv/bin/{SERVE}",
    "equals signs": "vllm serve org/model --max-num-seqs=64 --gpu_memory_utilization=0.9",
    "the model at the end": "vllm serve --max-num-seqs 64 --gpu-memory-utilization 0.9 --model org/model",
    "exec": f"exec {SERVE}",
    "nohup and background": f"nohup {SERVE} > server.log 2>&1 &",
    "env": f"env CUDA_VISIBLE_DEVICES=0 {SERVE}",
    "sudo -E": f"sudo -E {SERVE}",
    "numactl": f"numactl --cpunodebind=0 --membind=0 {SERVE}",
    "taskset and nice": f"taskset -c 0-7 nice -n -5 {SERVE}",
    "timeout": f"timeout 3600 {SERVE}",
    "uv run": f"uv run --with vllm {SERVE}",
    "conda run": f"conda run -n vllm --no-capture-output {SERVE}",
    "poetry run": f"poetry run {SERVE}",
    "srun": f"srun --gres=gpu:1 --ntasks=1 {SERVE}",
    "srun with bash": f'srun -N1 --container-image=x.sqsh bash -c "{SERVE}"',
    "apptainer": f"apptainer exec --nv vllm.sif {SERVE}",
    "tmux": f"tmux new-session -d -s vllm '{SERVE}'",
    "screen": f"screen -dmS vllm bash -lc '{SERVE}'",
    "ssh": f"ssh gpu1 '{SERVE}'",
    "ray job": f"ray job submit --working-dir . -- {SERVE}",
    "a pipe": f"{SERVE} 2>&1 | tee vllm.log",
    "a chain": f"source venv/bin/activate && cd /srv && {SERVE} || exit 1",
    "a comment": f"{SERVE} # for the chat team",
    "a comment with an apostrophe": f"{SERVE} # it's for the chat team",
    "a continued line": SERVE.replace(" --", " \\\n    --"),
    "a continued line of Windows": SERVE.replace(" --", " \\\r\n    --"),
    "ps aux": f"root 4711 3.2 1.0 99999 8888 ? Sl 10:00 1:23 /usr/bin/python3 /usr/local/bin/{SERVE}",
    "assignments": f"VLLM_LOGGING_LEVEL=INFO OMP_NUM_THREADS=8 {SERVE}",
    "a default of a variable": "vllm serve ${MODEL:-org/model} --max-num-seqs ${SEQS:-64} --gpu-memory-utilization 0.9",
    "bare arguments": f"--model org/model {FLAGS}",
    "numbers as Python writes them": "vllm serve org/model --max-num-seqs +6_4 --gpu-memory-utilization .9",
    "a continued line of PowerShell": SERVE.replace(" --", " `\n    --"),
    "a continued line of cmd": SERVE.replace(" --", " ^\r\n    --"),
    "eval": f'eval "{SERVE}"',
    "docker": f"docker run --gpus all -p 8000:8000 {IMAGE} --model org/model {FLAGS}",
    "docker, positional": f"docker run --rm -it --gpus '\"device=0,1\"' {IMAGE} org/model {FLAGS}",
    "docker, serve": f"docker run --gpus all {IMAGE} serve org/model {FLAGS}",
    "docker, glued": f"docker run -itd -p8000:8000 --gpus=all -v$HOME/hf:/root/.cache {IMAGE} --model org/model {FLAGS}",
    "docker, entrypoint": f"docker run --entrypoint vllm --gpus all {IMAGE} serve org/model {FLAGS}",
    "docker, entrypoint bash": f"docker run --entrypoint /bin/bash {IMAGE} -c '{SERVE}'",
    "docker, module": f"docker run --gpus all --shm-size 8g registry.local/ml/llm:7 {MODULE}",
    "docker, another image": f"docker run --gpus all registry.local/llm:7 --model org/model {FLAGS}",
    "docker, options in a variable": f"docker run $GPU_ARGS --ipc host {IMAGE} --model org/model {FLAGS}",
    "docker exec": f"docker exec -it vllm {SERVE}",
    "sudo docker": f"sudo docker run -d --restart unless-stopped --runtime nvidia {IMAGE} --model org/model {FLAGS}",
    "podman": f"podman run --device nvidia.com/gpu=all --security-opt=label=disable {IMAGE} --model org/model {FLAGS}",
    "kubectl run": f"kubectl run vllm -n llm --image={IMAGE} --env=A=1 --restart=Never -- --model org/model {FLAGS}",
    "oc run, a command": f"oc run vllm --image {IMAGE} --command -- {SERVE}",
    "kubectl exec": f"kubectl exec -it vllm-0 -n llm -- {SERVE}",
    "apptainer run": f"apptainer run --nv --bind /m:/m docker://{IMAGE} --model org/model {FLAGS}",
    "singularity run": f"singularity run --nv vllm.sif --model org/model {FLAGS}",
    "nerdctl": f"nerdctl --namespace k8s.io run --gpus all --net host {IMAGE} --model org/model {FLAGS}",
    "rocm": f"docker run --device /dev/kfd --device /dev/dri --group-add video rocm/vllm:latest {SERVE}",
}  # fmt: skip


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line(line: str) -> None:
    made = read(line)
    assert (made.model, made.candidate, made.args) == ("org/model", SAID, {})


UNIT = "[Unit]\nAfter=network.target\n[Service]\nUser=vllm\n{}\nRestart=always\n"
POD = "spec: {{containers: [{{name: vllm, image: {}, {}}}]}}"
COMPOSE = "services:\n  vllm:\n    image: vllm/vllm-openai\n    command: {}\n  web: {{image: open-webui}}\n"
KSERVE = "kind: InferenceService\nmetadata: {{name: m}}\nspec:\n  predictor:\n    {}\n"
TEMPLATE = f"spec: {{containers: [{{name: vllm, image: {IMAGE}, args: [--model, org/model, {', '.join(FLAGS.split())}]}}]}}"
ITEMS = ", ".join(f'"{word}"' for word in FLAGS.split())
FILES = {
    "script.sh": f"#!/bin/bash\nset -euo pipefail\nMODEL=org/model\n# start\nexec vllm serve \"$MODEL\" \\\n  {FLAGS}\n",
    "array.sh": "ARGS=(\n  --max-num-seqs 64  # peak\n)\nARGS+=(--gpu-memory-utilization 0.9)\nvllm serve org/model \"${ARGS[@]}\"\n",
    "string.sh": "OPTS=\"--max-num-seqs 64\"\nOPTS=\"$OPTS --gpu-memory-utilization 0.9\"\nvllm serve org/model $OPTS\n",
    "default.sh": f"MODEL=${{MODEL:-org/model}}\nif [ -z \"$PORT\" ]; then PORT=8000; fi\nvllm serve $MODEL --port $PORT {FLAGS}\n",
    "heredoc.sh": f"cat > /tmp/x <<'EOF'\nvllm serve other --max-num-seqs 1\nEOF\n{SERVE}\n",
    "slurm.sbatch": f"#!/bin/bash\n#SBATCH --gres=gpu:1\nmodule load cuda\nsrun {SERVE}\n",
    "docker.sh": f"docker pull {IMAGE}\ndocker rm -f vllm || true\ndocker run -d --name vllm \\\n  --gpus all \\\n  {IMAGE} \\\n  --model org/model \\\n  {FLAGS}\n",
    "plain.service": UNIT.format(f"ExecStart=/opt/venv/bin/{SERVE}"),
    "continued.service": UNIT.format("ExecStart=/opt/venv/bin/vllm serve org/model \\\n# old: --max-num-seqs 8\n  --max-num-seqs 64 \\\n  --gpu-memory-utilization 0.9"),
    "variables.service": UNIT.format(f'Environment="MODEL=org/model" "OPTS={FLAGS}"\nExecStart=/opt/venv/bin/vllm serve ${{MODEL}} $OPTS'),
    "shell.service": UNIT.format(f"ExecStart=/bin/bash -c 'source /opt/venv/bin/activate && {SERVE}'"),
    "docker.service": UNIT.format(f"ExecStartPre=-/usr/bin/docker rm -f vllm\nExecStart=/usr/bin/docker run --rm --gpus all {IMAGE} --model org/model {FLAGS}"),
    "reset.conf": f"[Service]\nExecStart=\nExecStart=/opt/venv/bin/{SERVE}\n",
    "quadlet.container": f"[Container]\nImage=docker.io/{IMAGE}\nExec=--model org/model {FLAGS}\nAddDevice=nvidia.com/gpu=all\n",
    "compose.yaml": COMPOSE.format(f"--model org/model {FLAGS}"),
    "compose-list.yaml": COMPOSE.format(f'["--model", "org/model", {ITEMS}]'),
    "compose-folded.yaml": COMPOSE.format(f">\n      --model org/model\n      {FLAGS}"),
    "compose-variables.yaml": COMPOSE.format(f"--model ${{MODEL:-org/model}} {FLAGS}"),
    "compose-entrypoint.yaml": COMPOSE.format(f'["{SERVE}"]\n    entrypoint: ["/bin/bash", "-c"]'),
    "pod.yaml": "kind: Pod\n" + POD.format(IMAGE, f'args: ["--model", "org/model", {ITEMS}]'),
    "pod-equals.yaml": "kind: Pod\n" + POD.format(IMAGE, 'args: ["--model=org/model", "--max-num-seqs=64", "--gpu-memory-utilization=0.9"]'),
    "pod-one-string.yaml": "kind: Pod\n" + POD.format("x/y:1", f'command: ["{MODULE}"]'),
    "pod-string.yaml": "kind: Pod\n" + POD.format("x/y:1", f'command: "{SERVE}"'),
    "pod-pairs.yaml": "kind: Pod\n" + POD.format(IMAGE, 'args: ["--model org/model", "--max-num-seqs 64", "--gpu-memory-utilization 0.9"]'),
    "pod-sh.yaml": "kind: Pod\n" + POD.format("x/y:1", f'command: [sh, -c], args: ["{SERVE}"]'),
    "pod-env.yaml": "kind: Pod\n" + POD.format(IMAGE, f'args: ["--model", "$(MODEL)", {ITEMS}], env: [{{name: MODEL, value: org/model}}]'),
    "pod-shell-env.yaml": "kind: Pod\n" + POD.format("x/y:1", f'command: [bash, -ec, "vllm serve ${{MODEL}} $ARGS"], env: [{{name: MODEL, value: org/model}}, {{name: ARGS, value: "{FLAGS}"}}]'),
    "deployment.yaml": f"kind: Deployment\nspec:\n  template:\n    {TEMPLATE}\n",
    "statefulset.yaml": f"kind: StatefulSet\nspec:\n  template:\n    {TEMPLATE}\n",
    "job.yaml": f"kind: Job\nspec:\n  template:\n    {TEMPLATE}\n",
    "cronjob.yaml": f"kind: CronJob\nspec:\n  jobTemplate:\n    spec:\n      template:\n        {TEMPLATE}\n",
    "list.yaml": f"kind: List\nitems:\n- kind: Deployment\n  spec:\n    template:\n      {TEMPLATE}\n",
    "sidecars.yaml": f"kind: Pod\nspec:\n  containers:\n  - {{name: proxy, image: ghcr.io/llm-d/llm-d-routing-sidecar, args: [--vllm-port=8200]}}\n  - {{name: engine, image: x, command: [vllm, serve, org/model, {ITEMS}]}}\n",
    "lws.yaml": f"kind: LeaderWorkerSet\nspec:\n  leaderWorkerTemplate:\n    leaderTemplate:\n      spec:\n        containers:\n        - {{name: l, image: {IMAGE}, command: [sh, -c, 'bash /vllm-workspace/multi-node-serving.sh leader; {MODULE}']}}\n    workerTemplate:\n      spec:\n        containers:\n        - {{name: w, image: {IMAGE}, command: [sh, -c, 'bash /vllm-workspace/multi-node-serving.sh worker']}}\n",
    "kserve-model.yaml": KSERVE.format(f"model: {{modelFormat: {{name: vLLM}}, storageUri: 'hf://org/model', args: [{ITEMS}]}}"),
    "kserve-huggingface.yaml": KSERVE.format(f"model: {{modelFormat: {{name: huggingface}}, args: [--model_name=chat, --model_id=org/model, --backend=vllm, {ITEMS}]}}"),
    "kserve-containers.yaml": KSERVE.format(f"containers: [{{name: kserve-container, image: {IMAGE}, args: [--model, org/model, {ITEMS}]}}]"),
    "runtime.yaml": f"kind: ServingRuntime\nmetadata: {{name: r}}\nspec:\n  containers:\n  - {{name: kserve-container, image: {IMAGE}, command: [python, -m, vllm.entrypoints.openai.api_server], args: [--port=8080, --model=org/model, '--served-model-name={{{{.Name}}}}', {ITEMS}]}}\n",
    "llm-service.yaml": f"kind: LLMInferenceService\nspec:\n  model: {{uri: 'hf://org/model'}}\n  template:\n    containers:\n    - {{name: main, env: [{{name: VLLM_ADDITIONAL_ARGS, value: '{FLAGS}'}}]}}\n",
    "llm-service-args.yaml": f"kind: LLMInferenceService\nspec:\n  model: {{uri: 'hf://org/model'}}\n  template: {{containers: [{{name: main, args: [{ITEMS}]}}]}}\n",
    "llm-d.yaml": f"modelArtifacts: {{uri: 'hf://org/model', name: chat}}\ndecode:\n  containers: [{{name: vllm, image: x, modelCommand: vllmServe, args: [{ITEMS}]}}]\n",
    "llm-d-custom.yaml": f"modelArtifacts: {{uri: 'hf://org/model', name: chat}}\ndecode:\n  containers: [{{name: vllm, image: x, command: [sh, -c], args: ['{SERVE}']}}]\n",
    "production-stack.yaml": "servingEngineSpec:\n  modelSpec:\n  - {name: m, modelURL: org/model, vllmConfig: {}}\n".replace("vllmConfig: {}", "vllmConfig: {enablePrefixCaching: true, maxNumSeqs: 64, extraArgs: [--gpu-memory-utilization, '0.9', --no-enable-prefix-caching, --enable-prefix-caching]}"),
    "config.yaml": "model: org/model\nmax-num-seqs: 64\ngpu_memory_utilization: 0.9\n",
    "skypilot.yaml": f"resources: {{accelerators: H100:1}}\nenvs: {{MODEL: org/model}}\nrun: |\n  conda activate vllm\n  vllm serve $MODEL {FLAGS}\n",
    "configmap.yaml": f"kind: ConfigMap\ndata:\n  start.sh: |\n    #!/bin/sh\n    exec {SERVE}\n",
    "Dockerfile": f"# syntax=docker/dockerfile:1\nFROM python:3.12 AS built\nCMD [\"bash\"]\nFROM {IMAGE}\nENV A=1 B=\"2 3\"\nENTRYPOINT [\"vllm\", \"serve\", \\\n  # ours\n  \"org/model\"]\nCMD [{ITEMS}]\n",
    "Dockerfile.arguments": f"FROM {IMAGE}\nCMD [\"--model=org/model\", {ITEMS}]\n",
    "Dockerfile.shell": f"FROM x/y:1\nENV MODEL org/model\nCMD exec vllm serve $MODEL {FLAGS}\n",
    "ray-loading.yaml": "applications:\n- args:\n    llm_configs:\n    - model_loading_config: {model_id: chat, model_source: org/model}\n      engine_kwargs: {max_num_seqs: 64, gpu_memory_utilization: 0.9}\n",
    "ray.yaml": "applications:\n- args:\n    llm_configs:\n    - engine_kwargs: {model: org/model, max_num_seqs: 64, gpu_memory_utilization: 0.9}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    made = read(str(path))
    knobs = {key: value for key, value in made.candidate.items() if key != "enable_prefix_caching"}
    assert (made.model, knobs, made.args) == ("org/model", dict(SAID), {})


def test_there_are_many_forms() -> None:
    assert len(LINES) + len(FILES) >= 60


HANDED = [line for line in (CASES / "commands.txt").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    ("line", "candidate", "args"),
    [
        (HANDED[0], {"gpu_memory_utilization": 0.95}, {}),
        (HANDED[1], {"max_num_seqs": 64}, {}),
        (HANDED[2], {"max_num_seqs": 64}, {"max-model-len": "auto"}),
        (HANDED[3], {"max_num_seqs": 64}, {"trust-remote-code": True}),
        (HANDED[4], {}, {}),
    ],
)
def test_a_handed_case(line: str, candidate: dict[str, int], args: dict[str, object]) -> None:
    made = read(line)
    assert (made.model, made.candidate, made.args) == ("Qwen/Qwen3-8B", Candidate(candidate), args)
    assert "HF_TOKEN" not in made.env


def test_the_handed_deployment() -> None:
    made = read(str(CASES / "deployment.yaml"))
    assert (made.model, made.args) == ("/models/m", {"trust-remote-code": True})
    assert made.candidate == Candidate({"gpu_memory_utilization": 0.95, "tensor_parallel_size": 2})


def test_a_file_of_several_commands_asks_which() -> None:
    found = [source.name for source in sources(str(CASES / "commands.txt"))]
    assert found == ["chat-server", *(f"Qwen/Qwen3-8B-{number}" for number in (1, 2, 3, 4))]
    with pytest.raises(BadInput, match="pick one engine of chat-server"):
        read(str(CASES / "commands.txt"))


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (f"docker run --gpus all --ipc=host -v a:b {IMAGE} --model m", "are not read: --gpus --ipc -v"),
        (f"docker run -e HF_TOKEN -e A=1 {IMAGE} --model m", "HF_TOKEN comes from the environment in"),
        (f"docker run --env-file /no/such {IMAGE} --model m", "/no/such is not read; give its variables"),
        (f"docker run -e HF_TOKEN=hf_x {IMAGE} --model m", "HF_TOKEN is a secret and is not imported"),
        ("DB=postgresql://u:pw1x@h/d vllm serve m", "DB is a secret and is not imported"),
        ("vllm serve m --hf-token hf_abcdef", "--hf-token is a secret and is not imported"),
        ("vllm serve m --api-key k --port 1", "--api-key is set by the tuner for every launch"),
        ("vllm serve $MODEL --max-num-seqs 4", "the model $MODEL has no known value here"),
        ("vllm serve m --max-num-seqs $SEQS", "--max-num-seqs needs SEQS, whose value is not known"),
        ("vllm serve m --max-num-seqs $(nproc)", "--max-num-seqs needs nproc, whose value is not known"),
        ("vllm serve m --max-num-seqs 4 $EXTRA", "'$EXTRA' has no known value, so its arguments are missing"),
        ("vllm serve m --trust-remote-code $EXTRA", "'$EXTRA' has no known value, so its arguments are missing"),
        ("vllm serve m --max-num-seqs 4 --max-num-seqs 8", "--max-num-seqs occurs twice; the last one counts"),
        ("vllm serve m --swap-space 4", "recomputes preempted requests"),
        ("vllm serve m --num-scheduler-steps 8", "--async-scheduling lets steps overlap"),
        ("vllm serve m --disable-log-requests", "requests are not logged unless"),
        ("vllm serve m --eplb-window-size 3", "--eplb-window-size is gone"),
        ("if [ -d x ]; then vllm serve m; fi", "is in a condition"),
        ("A=(--seed 1)\nif x; then A+=(--enforce-eager); fi\nvllm serve m ${A[@]}", "A is changed in a condition"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_said(line: str, note: str) -> None:
    made = read(line)
    assert note in "\n".join(made.notes)
    assert "hf_" not in repr(made)
    assert "pw1x" not in repr(made)


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        (
            "stack.yaml",
            "servingEngineSpec: {modelSpec: [{modelURL: m, vllmConfig: {maxNumSeqs: 3}}]}",
            "prefix cache off",
        ),
        (
            "stack2.yaml",
            "servingEngineSpec: {modelSpec: [{modelURL: m, vllmConfig: {pipelineParallelSize: 2}}]}",
            "not a key that the chart reads",
        ),
        (
            "from.yaml",
            "kind: Pod\n" + POD.format(IMAGE, "args: [--seed, '1'], envFrom: [{configMapRef: {name: c}}]"),
            "envFrom c is not read",
        ),
        (
            "kserve.yaml",
            KSERVE.format("model: {modelFormat: {name: vllm}, runtime: r, args: [--seed=1]}"),
            "the settings of the runtime r",
        ),
        (
            "value.yaml",
            "kind: Pod\n" + POD.format(IMAGE, "args: [--seed, '1'], env: [{name: T, valueFrom: {}}]"),
            "T comes from elsewhere",
        ),
    ],
)
def test_what_a_manifest_leaves_out_is_said(tmp_path: Path, name: str, text: str, note: str) -> None:
    (tmp_path / name).write_text(text)
    assert note in "\n".join(read(str(tmp_path / name)).notes)


NONE = {
    "nginx.yaml": "kind: Pod\n" + POD.format("nginx", "args: [-g, 'daemon off;']"),
    "bare.yaml": "kind: Pod\n" + POD.format(IMAGE, "command: [sleep, infinity]"),
    "script.yaml": "kind: Pod\n" + POD.format(IMAGE, "command: [bash, /scripts/start.sh]"),
    "sglang.yaml": "kind: Pod\n"
    + POD.format("lmsysorg/sglang", "command: [python3, -m, sglang.launch_server, --model-path, m]"),
    "tgi.yaml": "kind: Pod\n" + POD.format("text-generation-inference", "args: [--model-id, m]"),
    "router.yaml": "kind: Pod\n" + POD.format("vllm-stack/router", "args: [--port=8000]").replace("vllm,", "router,"),
    "compose.yaml": "services: {web: {image: nginx}}",
    "bench.sh": "vllm bench serve --model m --num-prompts 3\n",
    "docker.sh": f"docker run --gpus all {IMAGE} bash\n",
    "other.sh": "docker run --gpus all ollama/ollama serve\n",
    "unit.service": "[Service]\nExecStart=/usr/sbin/nginx -g off\n",
    "empty.sh": "\n",
    "Dockerfile": f"FROM {IMAGE}\nRUN pip install x\n",
    "Dockerfile.nginx": "FROM nginx\nCMD [\"nginx\"]\n",
    "Dockerfile.broken": f"FROM {IMAGE}\nENTRYPOINT [\"vllm\", \n",
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_a_file_that_starts_no_vllm_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(NONE[name])
    with pytest.raises(BadInput, match=r"no vLLM|whose text is not in the file|it is empty"):
        read(str(tmp_path / name))


def test_environment_files_that_can_be_read_are(tmp_path: Path) -> None:
    (tmp_path / "vllm.env").write_text(
        "# ours\nexport SEQS=64\nHF_TOKEN='hf_abc'\nVLLM_LOGGING_LEVEL=\"INFO\"\n"
    )
    unit = tmp_path / "v.service"
    unit.write_text(
        f"[Service]\nEnvironmentFile=-{tmp_path}/vllm.env\nExecStart=/x/vllm serve m --max-num-seqs $SEQS\n"
    )
    made = read(str(unit))
    assert made.candidate == Candidate({"max_num_seqs": 64})
    assert made.env == {"SEQS": "64", "VLLM_LOGGING_LEVEL": "INFO"}
    assert made.notes == ("HF_TOKEN is a secret and is not imported",)


def test_quotes_comments_and_dollars_are_those_of_a_shell() -> None:
    made = read(
        'vllm serve m --hf-overrides \'{"a": "$x"}\' --chat-template "./it\'s #1.jinja" --revision 1#2'
    )
    assert made.args == {"hf-overrides": '{"a":"$x"}', "chat-template": "./it's #1.jinja", "revision": "1#2"}
