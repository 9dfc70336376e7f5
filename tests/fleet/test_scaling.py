"""What serves in Kubernetes is scaled by its API. No cluster here: a server answers as the API does."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.fleet.test_handover import NODE, clock
from tuner.errors import Unavailable
from tuner.fleet import hooks
from tuner.fleet.handover import handed_over
from tuner.history.store import Store

PATH = re.compile(r"^/apis/apps/v1/namespaces/prod/(deployments|statefulsets)/vllm(/scale)?$")


class Api(ThreadingHTTPServer):
    """One Deployment and one StatefulSet, and what was asked of them. `denied`: nobody may do anything."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replicas = {"deployments": 3, "statefulsets": 2}
        self.asked: list[tuple[str, str, Any]] = []
        self.denied = False


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self._answer(None)

    def do_PATCH(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        found = PATH.match(self.path)
        self.server.asked.append((self.command, self.path, body))
        if found is None or self.server.denied:
            code = 403 if self.server.denied else 404
            self._send(code, {"kind": "Status", "code": code, "reason": "Forbidden"})
            return
        kind, scale = found.groups()
        if self.command == "PATCH" and scale:
            self.server.replicas[kind] = body["spec"]["replicas"]
        count = self.server.replicas[kind]
        status = {
            "observedGeneration": 1,
            "replicas": count,
            "readyReplicas": count,
            "updatedReplicas": count,
        }
        if scale:
            status = {"replicas": count}
        meta = {"name": "vllm", "namespace": "prod", "generation": 1}
        spec = {"replicas": count}
        if not scale:
            spec |= {"selector": {}, "template": {}, "serviceName": "vllm"}  # type: ignore[dict-item]
        self._send(200, {"metadata": meta, "spec": spec, "status": status})

    def _send(self, code: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    server = Api()
    Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'tuner.db'}")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("deployment", 3), ("statefulset", 2)])
def test_what_serves_gets_back_as_many_replicas_as_it_had(
    store: Store, tmp_path: Path, api: Api, kind: str, count: int
) -> None:
    hooks.write(tmp_path, "gpu-1", {"handover": [{"kubectl": f"prod/{kind}/vllm"}]})
    with handed_over(store, NODE, home=tmp_path, clock=clock):
        assert api.replicas[f"{kind}s"] == 0
    assert api.replicas[f"{kind}s"] == count
    path = f"/apis/apps/v1/namespaces/prod/{kind}s/vllm"
    assert api.asked == [
        ("GET", path, None),
        ("PATCH", f"{path}/scale", {"spec": {"replicas": 0}}),
        ("PATCH", f"{path}/scale", {"spec": {"replicas": count}}),
        ("GET", path, None),
    ]


def test_what_runs_nowhere_stays_so(store: Store, tmp_path: Path, api: Api) -> None:
    api.replicas["deployments"] = 0
    hooks.write(tmp_path, "gpu-1", {"handover": [{"kubectl": "prod/deployment/vllm"}]})
    with handed_over(store, NODE, home=tmp_path, clock=clock):
        assert store.handover("gpu-1") is None
    assert [method for method, _, _ in api.asked] == ["GET"]


def test_without_the_right_to_read_nothing_is_drained(store: Store, tmp_path: Path, api: Api) -> None:
    api.denied = True
    hooks.write(tmp_path, "gpu-1", {"handover": [{"kubectl": "prod/deployment/vllm"}]})
    taken = handed_over(store, NODE, home=tmp_path, clock=clock)
    with pytest.raises(Unavailable, match=r"is not known: prod/deployment/vllm: Forbidden"), taken:
        pytest.fail("the body must not run")


def test_replicas_that_do_not_answer_yet_are_not_ready(api: Api) -> None:
    words = [sys.executable, "-m", "tuner.fleet.hooks", "ready", "prod/deployment/none"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("prod/deployment/none: ")) == (1, True)
