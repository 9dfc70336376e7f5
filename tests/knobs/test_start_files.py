"""What starts vLLM in other files: batch files, PowerShell, Dockerfiles, playbooks, ConfigMaps."""

# ruff: noqa: E501

from pathlib import Path

import pytest

from tests.knobs.test_forms import FLAGS, IMAGE, MODULE, SAID
from tuner.errors import BadInput
from tuner.knobs.manifests import read

FILES = {
    "handed.bat": "@echo off\nREM start\nset MODEL=org/model\nset \"SEQS=64\"\nvllm serve %MODEL% ^\n  --max-num-seqs %SEQS% ^\n  --gpu-memory-utilization 0.9\npause\n",
    "docker.cmd": f"@echo off\nsetlocal\n:: image\nset MODEL=org/model\ndocker run --rm -e HF_TOKEN=%HF_TOKEN% {IMAGE} ^\n --model %MODEL% {FLAGS} > log.txt 2>&1\n",
    "added.bat": "set MODEL=org/model\nset ARGS=--max-num-seqs 64\nset ARGS=%ARGS% --gpu-memory-utilization 0.9\nvllm serve %MODEL% %ARGS%\n",
    "blocks.bat": f"if not defined MODEL set MODEL=org/model\nif exist C:\\venv (\n  call C:\\venv\\Scripts\\activate.bat\n) else (\n  echo no\n)\nstart \"vllm\" /b C:\\venv\\Scripts\\{MODULE} --model %MODEL% {FLAGS}\n",
    "late.cmd": f"setlocal enabledelayedexpansion\nset MODEL=org/model\ncall conda activate vllm && vllm serve !MODEL! {FLAGS} & echo done\n",
    "linux.cmd": f'wsl -d Ubuntu bash -lc "vllm serve org/model {FLAGS}"\n',
    "cases.bat": "SET model=org/model\nset SEQS=64& set \"U=0.9\" & rem x\nvllm serve %MODEL% --max-num-seqs %Seqs% --gpu-memory-utilization %u% 2>&1 || exit /b 1\n",
    "unless.bat": f"if \"%MODEL%\"==\"\" set MODEL=org/model\n@vllm serve \"%MODEL%\" {FLAGS}\n",
    "cases.ps1": f"$Env:Model = \"org\"\n$name = \"$Env:MODEL/model\"\npython -m vllm.entrypoints.openai.api_server --model ${{Name}} {FLAGS}\n",
    "string.ps1": f"$env:M = 'org/model'; $cmd = \"vllm serve ${{env:M}} {FLAGS}\"\nInvoke-Expression $cmd\n",
    "handed.ps1": "$env:MODEL = 'org/model'\n$seqs = 64\nvllm serve $env:MODEL `\n  --max-num-seqs $seqs `\n  --gpu-memory-utilization 0.9\n",
    "splat.ps1": "# start\n$Model = \"org/model\"\n$vllmArgs = @(\n  '--max-num-seqs', 64,  # sequences\n  '--gpu-memory-utilization', 0.9\n)\n& vllm serve $model @VllmArgs\n",
    "parameters.ps1": "<# starts #>\nparam(\n  [string]$Model = 'org/model',\n  [int]$Seqs = 64\n)\nvllm serve $Model --max-num-seqs $Seqs --gpu-memory-utilization 0.9 2>&1 | Tee-Object log.txt\n",
    "docker.ps1": f"docker run --rm -e HF_TOKEN=$env:HF_TOKEN -v ${{PWD}}:/w {IMAGE} `\n  --model org/model `\n  {FLAGS}\n",
    "started.ps1": f"if (-not $env:MODEL) {{ $env:MODEL = 'org/model' }}\nif ($true) {{\n  Write-Host \"use $($env:MODEL)\"\n}}\nStart-Process -FilePath vllm -ArgumentList \"serve $env:MODEL {FLAGS}\" -NoNewWindow\n",
    "list.ps1": "$a = @('serve', 'org/model', '--max-num-seqs', '64')\n$a += @('--gpu-memory-utilization', '0.9')\n& vllm $a\n",
    "block.md": f"# Start\n```powershell\n$m = 'org/model'\nvllm serve $m `\n  {FLAGS}\n```\n",
    "pasted.txt": f"vllm serve org/model ^\n  {FLAGS}\n",
}  # fmt: skip


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("name", FILES)
def test_I29_3_a_start_file_of_windows(tmp_path: Path, name: str, ends: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name].replace("\n", ends).encode())
    made = read(str(path))
    assert (made.model, made.candidate, made.args) == ("org/model", SAID, {})


def test_I29_3_objects_and_paths_keep_their_quotes_and_backslashes(tmp_path: Path) -> None:
    batch, power = tmp_path / "a.bat", tmp_path / "b.ps1"
    batch.write_text('vllm serve m --hf-overrides "{\\"a\\": \\"$x\\"}" --download-dir C:\\models\\it\'s\n')
    power.write_text('vllm serve m --hf-overrides \'{"a": "$x"}\' --download-dir "C:\\models\\it\'s"\n')
    for path in (batch, power):
        assert read(str(path)).args == {"hf-overrides": '{"a":"$x"}', "download-dir": "C:\\models\\it's"}


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        ("a.bat", "vllm serve %MODEL% --max-num-seqs 64\n", "the model $MODEL has no known value here"),
        ("b.bat", "set MODEL=%1\nvllm serve %MODEL%\n", "the model $1 has no known value here"),
        (
            "c.cmd",
            "set /p SEQS=How many: \nvllm serve m --max-num-seqs %SEQS%\n",
            "--max-num-seqs needs SEQS",
        ),
        ("d.ps1", "vllm serve $env:MODEL --max-num-seqs 64\n", "the model $MODEL has no known value here"),
        ("e.ps1", "$n = Get-Random\nvllm serve m --max-num-seqs $n\n", "--max-num-seqs needs $(Get-Random)"),
        ("f.ps1", "vllm serve $cfg.Model --max-num-seqs (32 * 2)\n", "--max-num-seqs needs $(32 * 2)"),
        ("g.sh", "N=$(nproc)\nvllm serve m --max-num-seqs $N\n", "--max-num-seqs needs nproc"),
    ],
)
def test_I29_3_what_is_not_given_is_named_and_left_out(
    tmp_path: Path, name: str, text: str, missing: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    made = read(str(path))
    assert any(note.startswith(missing) for note in made.notes), made.notes
    assert "max_num_seqs" not in made.candidate or made.candidate["max_num_seqs"] == 64
    assert made.model in (None, "m")


ITEMS = '"--max-num-seqs", "64", "--gpu-memory-utilization", "0.9"'
IMAGES = {
    "handed": f"ARG BASE={IMAGE}\nFROM ${{BASE}}\nARG MODEL=org/model\nENV MODEL=$MODEL\nENTRYPOINT [\"vllm\", \"serve\"]\nCMD [\"$MODEL\", {ITEMS}]\n",
    "shell form": "FROM x/y:1\nARG MODEL=org/model\nENV MODEL=${MODEL} SEQS=64\nENTRYPOINT exec vllm serve $MODEL --max-num-seqs ${SEQS} --gpu-memory-utilization 0.9\n",
    "comments and empty lines between": f"FROM {IMAGE}\nENTRYPOINT [\"python3\", \"-m\", \\\n# ours\n  \"vllm.entrypoints.openai.api_server\", \\\n\n  # model\n  \"--model\", \"org/model\"]\nCMD [{ITEMS}]\n",
    "a shell form in lines": "FROM x\nCMD vllm serve org/model \\\n# sequences\n  --max-num-seqs 64 \\\n\n  --gpu-memory-utilization 0.9\n",
    "sh -c": f"FROM {IMAGE}\nENV MODEL=org/model\nENTRYPOINT [\"/bin/sh\", \"-c\"]\nCMD [\"exec vllm serve $MODEL {FLAGS}\"]\n",
    "variables in ENV": f"FROM x\nENV MODEL org/model\nENV ARGS=\"--model $MODEL {FLAGS}\"\nCMD python3 -m vllm.entrypoints.openai.api_server $ARGS\n",
    "a backtick escapes": "# escape=`\nFROM x\nCMD vllm serve org/model `\n --max-num-seqs 64 `\n --gpu-memory-utilization 0.9\n",
    "a stage that continues another": f"ARG TAG=v0.20.0\nFROM vllm/vllm-openai:${{TAG}} AS base\nENV MODEL=org/model\nENTRYPOINT [\"vllm\", \"serve\"]\nFROM base\nCMD [\"org/model\", {ITEMS}]\n",
    "an argument before FROM": f"ARG MODEL=org/model\nFROM x\nARG MODEL\nENV MODEL=$MODEL\nCMD vllm serve $MODEL {FLAGS}\n",
    "a script in the file": f"FROM {IMAGE}\nENV MODEL=org/model\nRUN <<EOF\necho vllm serve other\nEOF\nCOPY <<'EOF' /start.sh\n#!/bin/sh\nexec vllm serve $MODEL {FLAGS}\nEOF\nENTRYPOINT [\"/start.sh\"]\n",
    "arguments of the image": f"FROM {IMAGE}\nCMD --model org/model {FLAGS}\n",
}  # fmt: skip


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("name", IMAGES)
def test_I29_3_a_dockerfile(tmp_path: Path, name: str, ends: str) -> None:
    path = tmp_path / "Dockerfile.sh"
    path.write_bytes(IMAGES[name].replace("\n", ends).encode())
    made = read(str(path))
    assert (made.model, made.candidate, made.args) == ("org/model", SAID, {})


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("FROM x\nARG MODEL\nENV MODEL=$MODEL\nCMD vllm serve $MODEL\n", "the model $MODEL has no known value here"),
        ("FROM x\nARG MODEL=m\nCMD vllm serve $MODEL\n", "MODEL is an ARG, which has no value when the image runs"),
        (f"FROM {IMAGE}\nENV M=m\nCMD [\"--model\", \"$M\"]\n", "Docker replaces no variable in a JSON list: vLLM gets $M"),
        (f"FROM {IMAGE}\nCMD --model m\n", "CMD is not a JSON list, so the entrypoint gets sh -c and all words as one text"),
        ("FROM x\nCMD vllm serve m --max-num-seqs $SEQS\n", "--max-num-seqs needs SEQS"),
    ],
)  # fmt: skip
def test_I29_3_what_docker_passes_otherwise_or_not_at_all_is_named(
    tmp_path: Path, text: str, missing: str
) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    made = read(str(path))
    assert any(note.startswith(missing) for note in made.notes), made.notes
    assert made.model in (None, "m")
    assert not made.candidate


PLAY = f"- hosts: gpu\n  vars:\n    model: org/model\n    seqs: 64\n    image: {IMAGE}\n    flags: '--max-num-seqs {{{{ seqs }}}} --gpu-memory-utilization 0.9'\n  tasks:\n"
TASKS = {
    "command": "  - name: start\n    ansible.builtin.command: vllm serve {{ model }} {{ flags }}\n",
    "command with a list": "  - command:\n      argv: [vllm, serve, '{{ model }}', --max-num-seqs, '{{ seqs }}', --gpu-memory-utilization, \"{{ util | default(0.9) }}\"]\n",
    "command with its own arguments": "  - command: chdir=/srv creates=/x vllm serve {{ model | quote }} {{ flags }}\n",
    "shell": "  - shell: |\n      source /opt/venv/bin/activate\n      nohup vllm serve {{ model }} {{ flags }} > log 2>&1 &\n    args: {chdir: /srv}\n",
    "shell with an environment": "  - shell: vllm serve $MODEL {{ flags }}\n    environment: {MODEL: '{{ model }}'}\n",
    "docker_container with a list": "  - community.docker.docker_container:\n      name: vllm\n      image: '{{ image }}'\n      command: [--model, '{{ model }}', --max-num-seqs, '{{ seqs }}', --gpu-memory-utilization, '0.9']\n",
    "docker_container with a text": "  - docker_container:\n      image: '{{ image }}'\n      command: >-\n        --model {{ model }}\n        {{ flags }}\n",
    "podman_container with an entrypoint": "  - containers.podman.podman_container:\n      image: x/y:1\n      entrypoint: vllm serve\n      command: '{{ model }} {{ flags }}'\n",
    "a list in a variable": "  - set_fact:\n      words: [--max-num-seqs, 64, --gpu-memory-utilization, 0.9]\n  - docker_container: {image: '{{ image }}', command: \"{{ ['--model', model] + words }}\"}\n",
    "a condition": "  - shell: vllm serve {{ model }} {% if seqs %}{{ flags }}{% endif %}\n",
    "a block": "  - block:\n    - shell: vllm serve {{ m }} {{ flags }}\n    vars: {m: '{{ model }}'}\n",
    "a unit": "  - copy:\n      dest: /etc/systemd/system/vllm.service\n      content: |\n        [Service]\n        Environment=MODEL={{ model }}\n        ExecStart=/opt/bin/vllm serve ${MODEL} {{ flags }}\n",
    "a manifest": "  - kubernetes.core.k8s:\n      definition:\n        kind: Pod\n        spec: {containers: [{name: v, image: '{{ image }}', args: [--model, '{{ model }}', --max-num-seqs, '{{ seqs }}', --gpu-memory-utilization, '0.9']}]}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_I29_3_an_ansible_playbook(tmp_path: Path, name: str) -> None:
    path = tmp_path / "site.yml"
    path.write_text(PLAY + TASKS[name])
    made = read(str(path))
    assert (made.model, made.candidate, made.args) == ("org/model", SAID, {})


def test_I29_3_a_file_of_tasks_and_the_files_of_its_variables(tmp_path: Path) -> None:
    (tmp_path / "main.yml").write_text(
        f"- name: one\n  shell: vllm serve org/model {FLAGS}\n- name: two\n  command: vllm serve b\n"
    )
    assert read(str(tmp_path / "main.yml"), pick="one").candidate == SAID
    play = "- hosts: all\n  vars_files: [v.yml, w.yml]\n  tasks:\n  - command: vllm serve {{ vllm.model }} --max-num-seqs {{ seqs }}\n"
    (tmp_path / "play.yml").write_text(play)
    (tmp_path / "v.yml").write_text("vllm: {model: org/model}\n")
    made = read(str(tmp_path / "play.yml"))
    assert (made.model, dict(made.candidate)) == ("org/model", {})
    assert any("w.yml is not read" in note for note in made.notes)
    assert any(note.startswith("--max-num-seqs needs seqs") for note in made.notes)


@pytest.mark.parametrize(
    ("task", "missing"),
    [
        ("command: vllm serve {{ model }}", "the model $model has no known value here"),
        ("command: vllm serve {{ vllm.model }}", "the model $vllm has no known value here"),
        ("shell: vllm serve m --max-num-seqs {{ lookup('env', 'N') }}", "--max-num-seqs needs N"),
        ("shell: vllm serve m --max-num-seqs {{ seqs | no_such_filter }}", "--max-num-seqs needs seqs"),
        ("docker_container: {image: vllm/vllm-openai, command: '--model m --max-num-seqs {{ item }}'}", "--max-num-seqs needs item"),
    ],
)  # fmt: skip
def test_I29_3_a_variable_of_ansible_without_a_value_is_named(
    tmp_path: Path, task: str, missing: str
) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(f"- {task}\n")
    made = read(str(path))
    assert any(note.startswith(missing) for note in made.notes), made.notes
    assert made.model in (None, "m")
    assert not made.candidate


def config_map(*data: str, name: str = "s") -> str:
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata:\n" + "".join(data)


def pod(container: str, volume: str = "configMap: {name: s}") -> str:
    return f"---\nkind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n      - name: v\n        image: {IMAGE}\n        {container}\n        volumeMounts: [{{name: c, mountPath: /etc/vllm}}]\n      volumes: [{{name: c, {volume}}}]\n"


CONFIG = "  config.yaml: |\n    max-num-seqs: 64\n    gpu_memory_utilization: 0.9\n"
SCRIPT = f"  start.sh: |\n    #!/bin/bash\n    exec vllm serve $MODEL {FLAGS}\n"
MAPS = {
    "a script": config_map(SCRIPT.replace("$MODEL", "org/model")),
    "a script and its variables": config_map("  MODEL: org/model\n", SCRIPT),
    "a config file": config_map(CONFIG, "  other: text\n").replace("config.yaml: |\n", "config.yaml: |\n    model: org/model\n"),
    "a script with its config file": config_map("  run.sh: exec vllm serve org/model --config /etc/vllm/config.yaml --max-num-seqs 64\n", CONFIG.replace("64", "8")),
    "arguments": config_map(f"  VLLM_ARGS: --model org/model {FLAGS}\n"),
    "a mounted config file": config_map(CONFIG) + pod("args: [--model, org/model, --config=/etc/vllm/config.yaml]"),
    "a mounted script": config_map(SCRIPT) + pod("command: [bash, /etc/vllm/start.sh]\n        env: [{name: MODEL, value: org/model}]"),
    "a script behind sh -c": config_map(SCRIPT) + pod("command: [sh, -c]\n        args: ['/etc/vllm/start.sh --x']\n        env: [{name: MODEL, value: org/model}]"),
    "a script with arguments": config_map("  start.sh: exec vllm serve \"$@\"\n") + pod(f"command: [bash, /etc/vllm/start.sh, org/model, {ITEMS}]"),
    "an item under another path": config_map(CONFIG) + pod("args: [--model, org/model, --config, /etc/vllm/v.yaml]", "configMap: {name: s, items: [{key: config.yaml, path: v.yaml}]}"),
    "a projected volume": config_map(CONFIG) + pod("args: [--model, org/model, --config, /etc/vllm/config.yaml]", "projected: {sources: [{configMap: {name: s}}]}"),
    "variables of a ConfigMap": config_map("  MODEL: org/model\n  SEQS: '64'\n") + pod("command: [sh, -c, 'vllm serve $MODEL --max-num-seqs $SEQS --gpu-memory-utilization 0.9']\n        envFrom: [{configMapRef: {name: s}}]"),
    "one variable of a ConfigMap": config_map("  model: org/model\n") + pod(f"args: [--model, $(MODEL), {ITEMS}]\n        env: [{{name: MODEL, valueFrom: {{configMapKeyRef: {{name: s, key: model}}}}}}]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_I29_3_a_config_map(tmp_path: Path, name: str) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(MAPS[name])
    made = read(str(path))
    assert (made.model, made.candidate, made.args) == ("org/model", SAID, {})
    assert not any("not read" in note for note in made.notes)


def test_I29_3_what_another_config_map_has_is_named_and_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(
        config_map(CONFIG, name="other") + pod("args: [--model, m, --config, /etc/vllm/config.yaml]")
    )
    made = read(str(path), pick="Deployment")
    assert dict(made.candidate) == {}
    assert any("--config /etc/vllm/config.yaml cannot be read here" in note for note in made.notes)
    path.write_text(pod("command: [bash, /etc/vllm/start.sh]"))
    with pytest.raises(
        BadInput, match=r"starts the script 'bash /etc/vllm/start.sh', whose text is not in the file"
    ):
        read(str(path))
    path.write_text(config_map(SCRIPT))
    assert "the model $MODEL has no known value here; write its name" in read(str(path)).notes


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("Dockerfile", "FROM x\nCOPY s.sh /\nENTRYPOINT [\"/s.sh\"]\n", "the image starts the script /s.sh, whose text is not in the file"),
        ("site.yml", "- hosts: gpu\n  roles: [vllm]\n", "this is an Ansible playbook .roles and included files are not read"),
        ("map.yaml", config_map("  nginx.conf: 'server {}'\n"), "this is Kubernetes: ConfigMap, and it starts no vLLM"),
        ("run.ps1", "Write-Host 'no'\n", "no vLLM is started there"),
        ("run.bat", "echo no\n", "no vLLM is started there"),
    ],
)  # fmt: skip
def test_I29_3_a_file_that_starts_no_vllm_says_what_to_give(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        read(str(path))
