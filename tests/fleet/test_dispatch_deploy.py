"""The image and the manifests: their form against Kubernetes' own schemas, their commands by running them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tuning.studies import WATCHDOG_S, command, environment, tuner, write
from tuner import __version__
from tuner.engine.http import fresh_port
from tuner.errors import BadInput, StudyFailed

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
RELEASES = ("1.29", "1.31", "1.34")
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[.*?\])?==(\S+)", re.MULTILINE)
EXTRAS = ("postgres", "cluster", "capture", "kubernetes")
TINI = ["/opt/tuner/bin/tini", "--", "/opt/tuner/bin/tuner"]
Object = Mapping[str, Any]


def objects(path: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


ALL = [(path, each) for path in FILES for each in objects(path)]
NATIVE = [each for _, each in ALL if each["kind"] != "ServiceMonitor"]


def named(kind: str, name: str | None = None) -> Object:
    (found,) = [e for _, e in ALL if e["kind"] == kind and name in (None, e["metadata"]["name"])]
    return found


def pods() -> dict[str, Object]:
    """The pod of every workload, by kind."""
    night = named("CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return {
        "CronJob": night,
        "Job": named("Job")["spec"]["template"]["spec"],
        "Deployment": named("Deployment")["spec"]["template"]["spec"],
    }


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("found", NATIVE, ids=lambda each: each["kind"])
def test_a_manifest_is_what_kubernetes_takes(found: Object, release: str) -> None:
    kubernetes_validate.validate(found, release, strict=True)


def test_what_kubernetes_would_refuse_is_refused_here() -> None:
    broken = {**named("Job"), "spec": {"templates": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, RELEASES[0], strict=True)


def test_the_service_monitor_finds_the_service() -> None:
    monitor, service = named("ServiceMonitor"), named("Service")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor) == {"apiVersion", "kind", "metadata", "spec"}
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert labels.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["type"] == "Bearer"
    assert set(endpoint["authorization"]["credentials"]) == {"name", "key"}
    seconds = {name: int(endpoint[name].removesuffix("s")) for name in ("interval", "scrapeTimeout")}
    assert seconds["scrapeTimeout"] < seconds["interval"]


def test_the_service_finds_the_pods_and_the_pods_their_account_and_volume() -> None:
    labels = named("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert named("Service")["spec"]["selector"].items() <= labels.items()
    assert named("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    account = named("ServiceAccount")["metadata"]["name"]
    assert {kind: pod.get("serviceAccountName") for kind, pod in pods().items()} == {
        "Job": account,
        "CronJob": account,
        "Deployment": None,
    }
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pods()["Deployment"]["volumes"][:1]]
    assert claims == [named("PersistentVolumeClaim")["metadata"]["name"]]
    binding = named("RoleBinding")
    assert binding["roleRef"]["name"] == named("Role")["metadata"]["name"]


@pytest.mark.parametrize("kind", ["CronJob", "Job", "Deployment"])
def test_pods_run_without_rights_and_mount_what_they_declare(kind: str) -> None:
    pod = pods()[kind]
    assert pod["securityContext"]["runAsNonRoot"] is True
    declared = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= declared
        if container["image"].startswith("vllm-config-tuner:"):
            assert container["image"] == f"vllm-config-tuner:{__version__}"


def test_job_and_nightly_job_are_one_pod() -> None:
    job, night = pods()["Job"], pods()["CronJob"]
    (one,), (other,) = job["containers"], night["containers"]
    assert {**one, "args": None} == {**other, "args": None}
    assert {**job, "containers": None} == {**night, "containers": None}
    assert one["resources"]["limits"]["nvidia.com/gpu"] >= 1


def test_a_night_ends_after_its_window() -> None:
    night = named("CronJob")["spec"]
    (container,) = pods()["CronJob"]["containers"]
    minute, hour, *rest = night["schedule"].split()
    assert rest == ["*", "*", "*"]
    until = container["args"][container["args"].index("--until") + 1]
    end_h, end_m = (int(part) for part in until.split(":"))
    window_s = ((end_h * 60 + end_m) - (int(hour) * 60 + int(minute))) % (24 * 60) * 60
    assert window_s + night["startingDeadlineSeconds"] > 0
    assert night["jobTemplate"]["spec"]["activeDeadlineSeconds"] > window_s
    assert night["concurrencyPolicy"] == "Forbid"


def words(container: Object) -> list[str]:
    return [str(word) for word in [*container["command"], *container.get("args", [])]]


def ours(container: Object) -> list[str]:
    """What follows `tuner` in a container's command, which begins with tini."""
    line = words(container)
    assert line[:3] == TINI
    return line[3:]


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [("Job", ["--trials", "1"], "trial 0 (baseline)"), ("CronJob", ["--dry-run"], "--max-num-seqs 4")],
)
def test_the_command_of_a_job_tunes(kind: str, more: list[str], told: str, tmp_path: Path) -> None:
    """As it stands there, but for the folder of the study and what makes it short."""
    study = write(tmp_path)
    study.rename(tmp_path / "chat.yaml")
    (container,) = pods()[kind]["containers"]
    line = [word.replace("/studies/", f"{tmp_path}/") for word in ours(container)]
    done = tuner(tmp_path / "home", *line, *more)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["Job", "CronJob"])
def test_the_folder_of_the_tuner_is_copied_whole(kind: str, tmp_path: Path) -> None:
    (container,) = pods()[kind]["initContainers"]
    inside, shared = tmp_path / "opt", tmp_path / "shared"
    (inside / "bin").mkdir(parents=True)
    shared.mkdir()
    (inside / "bin" / "tuner").symlink_to("../venv/bin/tuner")
    line = " ".join(words(container)).replace("/opt/tuner/", f"{inside}/").replace("/shared/", f"{shared}/")
    subprocess.run(line.split(), check=True, timeout=WATCHDOG_S)
    assert os.readlink(shared / "bin" / "tuner") == "../venv/bin/tuner"
    mounts = pods()[kind]["containers"][0]["volumeMounts"]
    assert {"name": "tuner", "mountPath": "/opt/tuner", "readOnly": True} in mounts


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, int, str]]:
    """The Deployment's commands at work: the database upgraded, a token made, the service on a free port."""
    pod = pods()["Deployment"]
    (upgrade,), (serve,) = pod["initContainers"], pod["containers"]
    done = tuner(tmp_path, *ours(upgrade))
    assert done.returncode == 0, done.stderr
    comment = (DEPLOY / "kubernetes" / "servicemonitor.yaml").read_text()
    (make,) = re.findall(r"tuner (token create .*)", comment)
    token = tuner(tmp_path, *make.split()).stdout.strip()
    port = fresh_port()
    line = [str(port) if word == "8642" else word for word in ours(serve)]
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(command(*line), env=environment(tmp_path), stdout=log, stderr=log)
        try:
            end = time.monotonic() + WATCHDOG_S
            while answer(port, "/healthz") != 200:
                assert process.poll() is None, (tmp_path / "serve.log").read_text()
                assert time.monotonic() < end
                time.sleep(0.1)
            yield tmp_path, port, token
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WATCHDOG_S)


def answer(port: int, path: str, token: str | None = None) -> int | None:
    """The status of a GET; None where nobody listens."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def test_the_deployment_serves_what_its_probes_and_the_monitor_ask(served: tuple[Path, int, str]) -> None:
    _, port, token = served
    (container,) = pods()["Deployment"]["containers"]
    assert answer(port, container["readinessProbe"]["httpGet"]["path"]) == 200
    (endpoint,) = named("ServiceMonitor")["spec"]["endpoints"]
    assert answer(port, endpoint["path"]) == 401
    assert answer(port, endpoint["path"], token) == 200
    probe: Sequence[str] = container["livenessProbe"]["exec"]["command"]
    line = [
        word.replace("/opt/tuner/venv/bin/python", sys.executable).replace("8642", str(port))
        for word in probe
    ]
    assert subprocess.run(line, timeout=WATCHDOG_S, check=False).returncode == 0
    dead = [word.replace(str(port), "1") for word in line]
    assert subprocess.run(dead, timeout=WATCHDOG_S, check=False, capture_output=True).returncode != 0


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest), continued lines joined, comments left out."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_runs_the_tuner_under_tini_as_nobody_and_holds_no_vllm() -> None:
    found = instructions()
    last = {name: rest for name, rest in found}
    assert yaml.safe_load(last["ENTRYPOINT"]) == TINI
    assert last["USER"].split(":")[0] not in ("0", "root")
    assert [name for name, _ in found].index("USER") < [name for name, _ in found].index("ENTRYPOINT")
    assert not re.search(r"^(vllm|torch)==", (DEPLOY / "requirements.txt").read_text(), re.MULTILINE)
    run_as = {pod["securityContext"]["runAsUser"] for pod in pods().values()}
    assert run_as == {int(last["USER"].split(":")[0])}


def test_the_image_is_built_upon_a_digest() -> None:
    """Both stages, as a build argument without a default; another name is refused by the first command."""
    bases = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    assert bases == ["${BASE_IMAGE}", "${BASE_IMAGE}"]
    assert ("ARG", "BASE_IMAGE") in instructions()
    check = next(rest for name, rest in instructions() if name == "RUN")
    for image, code in (("python:3.12-slim", 1), ("python@sha256:" + "0" * 64, 0), ("", 1)):
        done = subprocess.run(
            ["sh", "-c", check], env={"BASE_IMAGE": image}, check=False, capture_output=True
        )
        assert done.returncode == code, image


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-build.txt"])
def test_the_image_installs_by_hash(name: str) -> None:
    """Every requirement is pinned and hashed, no registry is named, and the installers insist on it."""
    text = (DEPLOY / name).read_text()
    assert "://" not in text
    parts = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).strip().splitlines()
    assert len(parts) > 5
    for part in parts:
        assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[^ ]+ .*--hash=sha256:[0-9a-f]{64}", part), part
    installs = [rest for _, rest in instructions() if f"-r {name}" in rest]
    assert installs
    assert all("--require-hashes" in rest for rest in installs)
    others = [rest for _, rest in instructions() if "pip install" in rest and "-r " not in rest]
    assert all("--no-deps /wheel/" in rest for rest in others)


def test_the_hashed_requirements_are_all_that_the_tuner_needs() -> None:
    """The same versions as the tests ran with, and every dependency of the image's extras."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *(each for extra in EXTRAS for each in project["optional-dependencies"][extra]),
    ]
    pinned, tested = (
        {canonicalize_name(name): version for name, version in PIN.findall(path.read_text())}
        for path in (DEPLOY / "requirements.txt", DEPLOY.parent / "constraints.txt")
    )
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    for name, version in tested.items():
        assert pinned.get(name, version) == version, name


def test_all_that_the_image_copies_is_there_and_all_that_it_needs_is_copied() -> None:
    root = DEPLOY.parent
    copied = {
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert all((root / source).exists() for source in copied)
    project = (root / "pyproject.toml").read_text()
    for needed in ("README.md", "search_spaces", "migrations"):
        assert needed in project
        assert needed in copied


def test_the_default_command_of_the_image_is_one_of_ours(tmp_path: Path) -> None:
    (words_,) = [yaml.safe_load(rest) for name, rest in instructions() if name == "CMD"]
    done = tuner(tmp_path, *words_, "--help")
    assert done.returncode == 0, done.stderr
    assert shutil.which("cp")


ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.parametrize("kind", ["Job", "CronJob", "Deployment"])
def test_the_account_is_mounted_where_production_is_handed_over_and_nowhere_else(kind: str) -> None:
    pod = pods()[kind]
    assert pod["automountServiceAccountToken"] is False
    has_it = {
        container["name"]
        for container in [*pod["initContainers"], *pod["containers"]]
        if ACCOUNT in [mount["mountPath"] for mount in container["volumeMounts"]]
    }
    assert has_it == (set() if kind == "Deployment" else {"tune"})
    sources = [v["projected"]["sources"] for v in pod["volumes"] if "projected" in v]
    files = {item["path"] for part in sources for each in part for item in _paths(each)}
    assert files == (set() if kind == "Deployment" else {"token", "ca.crt", "namespace"})


def _paths(source: Object) -> Sequence[Object]:
    (found,) = source.values()
    return [found] if "path" in found else found["items"]


def test_the_role_allows_what_a_hand_over_asks_and_no_more() -> None:
    allowed = {
        (resource, verb)
        for rule in named("Role")["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    kinds = ("deployments", "statefulsets")
    assert allowed == {(k, "get") for k in kinds} | {(f"{k}/scale", "patch") for k in kinds}


@pytest.mark.parametrize("kind", ["Job", "CronJob"])
def test_a_job_that_can_only_fail_again_is_not_retried(kind: str) -> None:
    spec = named(kind)["spec"]
    spec = spec["jobTemplate"]["spec"] if kind == "CronJob" else spec
    fails, ignores = spec["podFailurePolicy"]["rules"]
    codes = fails["onExitCodes"]
    (container,) = pods()[kind]["containers"]
    assert (fails["action"], codes["operator"], codes["containerName"]) == (
        "FailJob",
        "In",
        container["name"],
    )
    assert codes["values"] == [BadInput.exit_code, StudyFailed.exit_code]
    assert ignores["action"] == "Ignore"
    assert pods()[kind]["restartPolicy"] == "Never"  # podFailurePolicy asks for it


def test_networks_are_closed_but_for_the_port_of_the_service() -> None:
    for kind, name in (("Deployment", "tuner-service"), ("Job", "tuner-tune")):
        policy = named("NetworkPolicy", name)["spec"]
        labels = named(kind)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        ports = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
        assert ports == (["http"] if kind == "Deployment" else [])
        assert all("ports" in rule for rule in policy["egress"])


@pytest.mark.skipif(shutil.which("node") is None, reason="polkit's rules are JavaScript")
def test_the_polkit_rule_allows_two_verbs_on_the_listed_units_to_the_tuner_alone() -> None:
    """The rule in a JavaScript engine; polkit itself is not asked here."""
    rule = (DEPLOY / "systemd" / "50-tuner.rules").read_text()
    manage = "org.freedesktop.systemd1.manage-units"
    cases = [
        (manage, "tuner", "vllm.service", "stop", "yes"),
        (manage, "tuner", "vllm.service", "start", "yes"),
        (manage, "tuner", "vllm.service", "mask", None),
        (manage, "tuner", "sshd.service", "stop", None),
        (manage, "other", "vllm.service", "stop", None),
        ("org.freedesktop.systemd1.reload-daemon", "tuner", "vllm.service", "stop", None),
    ]
    code = (
        "let rule; const polkit = {Result: {YES: 'yes'}, addRule: f => { rule = f; }};"
        f"{rule}\nconst ask = ([id, user, unit, verb]) =>"
        " rule({id, lookup: k => ({unit, verb})[k]}, {user});"
        f"console.log(JSON.stringify({json.dumps(cases)}.map(c => ask(c) ?? null)));"
    )
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [case[-1] for case in cases]
