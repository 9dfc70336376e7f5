"""Sessions of the pages, failed logins, tokens that expire, and TLS."""

import asyncio
import json
import re
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient

from tests.service.world import World, serving
from tests.tuning.studies import answer, tuner
from tuner.history.entities import AuditEntry
from tuner.service import auth, connections
from tuner.service.auth import Attempts
from tuner.service.pages.session import COOKIE, csrf_of


def logged_in(world: World, token: str) -> TestClient:
    client = world.client()
    client.follow_redirects = False
    assert client.post("/login", data={"token": token}).status_code == 303
    return client


def copy_of(world: World, client: TestClient) -> TestClient:
    """Another browser with the same cookie."""
    other = world.client()
    other.follow_redirects = False
    other.cookies.set(COOKIE, client.cookies[COOKIE])
    return other


def events(world: World, action: str) -> list[AuditEntry]:
    return [entry for entry in world.store.audit() if entry.action == action]


def test_the_cookie_is_no_token_and_opens_nothing_in_the_api(world: World) -> None:
    token = world.token("admin")
    word = logged_in(world, token).cookies[COOKIE]
    assert token not in word
    assert token.split("_", 2)[2] not in word
    asked = world.client().get("/v1/runs", headers={"Authorization": f"Bearer {word}"})
    assert asked.status_code == 401
    by_token = world.client()
    by_token.cookies.set(COOKIE, token)
    assert by_token.get("/", follow_redirects=False).status_code == 303


def test_logging_out_ends_the_session_for_a_copied_cookie_too(world: World) -> None:
    client = logged_in(world, world.token("read"))
    copied = copy_of(world, client)
    assert copied.get("/").status_code == 200
    assert client.post("/logout", data={"csrf": csrf_of(client.cookies[COOKIE])}).status_code == 303
    assert copied.get("/").status_code == 303


def test_logging_in_again_ends_the_session_before(world: World) -> None:
    token = world.token("read")
    client = logged_in(world, token)
    copied = copy_of(world, client)
    assert client.post("/login", data={"token": token}).status_code == 303
    assert client.get("/").status_code == 200
    assert copied.get("/").status_code == 303


def test_a_session_ends_by_age_and_when_it_is_not_used(world: World) -> None:
    client = logged_in(world, world.token("read"))
    for _ in range(6):
        world.clock.forward(hours=1.9)
        assert client.get("/").status_code == 200
    world.clock.forward(hours=1)
    assert client.get("/").status_code == 303, "older than 12 hours, though it was used"
    client = logged_in(world, world.token("read"))
    world.clock.forward(hours=2)
    assert client.get("/").status_code == 303, "not used for 2 hours"


def test_a_session_ends_with_its_token_and_with_the_service(world: World) -> None:
    client = logged_in(world, world.token("read", days=0.01))
    world.clock.forward(days=0.01)
    assert client.get("/").status_code == 303
    client = logged_in(world, world.token("read"))
    again = World(world.home)
    assert copy_of(again, client).get("/").status_code == 303
    again.store.close()


def test_sessions_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MOST_SESSIONS", 2)
    token = world.token("read")
    first, second, third = (logged_in(world, token) for _ in range(3))
    assert [client.get("/").status_code for client in (first, second, third)] == [303, 200, 200]


def test_the_login_is_throttled_and_its_failures_are_in_the_audit(world: World) -> None:
    token, client = world.token("read"), world.client()
    client.follow_redirects = False
    for _ in range(5):
        assert client.post("/login", data={"token": "tuner_a_guess"}).status_code == 401
    refused = client.post("/login", data={"token": token})
    assert refused.status_code == 429
    assert 0 < int(refused.headers["Retry-After"]) <= 60
    failed = events(world, "login.failed")
    assert len(failed) == 5
    assert (failed[0].actor, failed[0].target) == ("nobody", "/login")
    assert failed[0].detail == {"client": "testclient"}
    assert "guess" not in json.dumps([entry.reason for entry in failed])
    world.clock.forward(minutes=1)
    assert client.post("/login", data={"token": token}).status_code == 303
    assert events(world, "login")[0].detail == {"client": "testclient", "token": token.split("_")[1]}


def test_one_address_does_not_lock_out_another_and_64_bits_are_one(world: World) -> None:
    attempts = Attempts(world.clock, most=2, span=timedelta(minutes=1))
    for last in ("1", "2"):
        attempts.failed(f"2001:db8:0:1::{last}")
        attempts.failed("192.0.2.1")
    assert attempts.wait_s("2001:db8:0:1:ffff::9") == 60
    assert attempts.wait_s("192.0.2.1") == 60
    assert attempts.wait_s("192.0.2.2") == attempts.wait_s("2001:db8:0:2::1") == 0


def test_a_wrong_token_of_the_api_is_once_an_hour_in_the_audit(world: World) -> None:
    world.token("read")
    client = world.client()
    for _ in range(3):
        assert client.get("/v1/runs", headers={"Authorization": "Bearer nothing"}).status_code == 401
    assert [entry.target for entry in events(world, "login.failed")] == ["/v1/runs"]
    world.clock.forward(hours=1)
    client.get("/v1/runs", headers={"Authorization": "Bearer nothing"})
    assert len(events(world, "login.failed")) == 2


def test_a_change_names_the_address_that_it_came_from(filled: World) -> None:
    body = {"state": "fault", "reason": "a new card"}
    assert filled.client("admin").put("/v1/nodes/n1/state", json=body).status_code == 200
    assert events(filled, "node")[0].detail["client"] == "testclient"


def test_a_token_expires_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    def life(*words: str) -> float | None:
        made = answer(tmp_path, "token", "create", "--name", "ci", "--scope", "read", "--json", *words)
        token = made["token"]
        assert isinstance(token, dict)
        until = token["expires_at"]
        if until is None:
            return None
        return round((datetime.fromisoformat(str(until)) - datetime.now(UTC)) / timedelta(days=1), 1)

    assert life() == 90.0
    assert life("--days", "7") == 7.0
    assert life("--expires", "2w") == 14.0
    assert life("--never") is None
    both = tuner(tmp_path, "token", "create", "--name", "ci", "--scope", "read", "--days", "7", "--never")
    assert (both.returncode, "give only one of" in both.stderr) == (2, True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


@pytest.mark.slow
def test_tls_by_files(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    token = str(answer(tmp_path, "token", "create", "--name", "ci", "--scope", "read", "--json")["text"])
    with serving(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        trusts = ssl.create_default_context(cafile=str(cert))
        where = f"https://127.0.0.1:{server.port}"
        taken = httpx.post(f"{where}/login", data={"token": token}, verify=trusts)
        assert taken.status_code == 303
        assert "secure" in taken.headers["set-cookie"].lower()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/healthz")
        log = server.log.read_text()
    assert re.search(rf"open https://\S+:{server.port}/  \(listening on 0\.0\.0\.0;", log)
    assert "unencrypted" not in log, "all addresses were listened on, by TLS"


def test_a_token_in_clear_beyond_loopback_is_warned_of(tmp_path: Path) -> None:
    answer(tmp_path, "token", "create", "--name", "ci", "--scope", "read", "--json")
    with serving(tmp_path) as server:
        assert "warning: tokens are sent to 0.0.0.0 unencrypted" in server.log.read_text()
    with serving(tmp_path, "--host", "127.0.0.1") as server:
        assert server.log.read_text().count("unencrypted") == 1


def test_files_that_are_no_certificate_are_refused(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    (tmp_path / "text").write_text("no key")
    for words, said in (
        (["--tls-cert", cert], "--tls-cert and --tls-key: give both"),
        (["--tls-cert", cert, "--tls-key", tmp_path / "none"], "No such file"),
        (["--tls-cert", cert, "--tls-key", tmp_path / "text"], "not a certificate and its key"),
        (["--tls-cert", key, "--tls-key", key], "not a certificate and its key"),
    ):
        done = tuner(tmp_path, "serve", *words)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_20_attack_a_tls_handshake_that_never_ends_is_not_waited_for(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection in its handshake is none yet: no other limit holds for it."""
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    terms = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    terms.load_cert_chain(*certificate)

    async def silent() -> bytes:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=terms)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            got = await asyncio.wait_for(reader.read(), 30)
            writer.close()
        return got

    with asyncio.Runner(loop_factory=connections.Loop) as runner:
        assert runner.run(silent()) == b""


def test_20_attack_a_server_may_open_more_files_than_a_process_usually_has() -> None:
    words = "import resource; from tuner.processes import allow_files; kind = resource.RLIMIT_NOFILE; "
    words += "resource.setrlimit(kind, (256, 2000)); allow_files(); print(resource.getrlimit(kind)); "
    words += "allow_files(1000); print(resource.getrlimit(kind))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["(2000, 2000)"] * 2


@pytest.mark.parametrize("believed", ["", "10.9.9.9", "10.9.9.9,10.1.0.0/16"])
def test_8_clients_of_a_proxy_share_one_login_limit_until_the_proxy_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch, believed: str
) -> None:
    """FORWARDED_ALLOW_IPS of docs/api.md names the proxy, which is on another host here."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", believed)
    if not believed:
        monkeypatch.delenv("FORWARDED_ALLOW_IPS")
    world.token("read")
    served = uvicorn.Config(world.app, log_config=None)
    served.load()
    proxy = TestClient(served.loaded_app, base_url="http://localhost", client=("10.1.2.3", 4000))
    answers = [
        proxy.post("/login", data={"token": "wrong"}, headers={"X-Forwarded-For": f"192.0.2.{n}"}).status_code
        for n in range(7)
    ]
    assert answers == ([401] * 7 if "10.1" in believed else [401] * 5 + [429] * 2)
    assert "FORWARDED_ALLOW_IPS" in (Path(__file__).parents[2] / "docs" / "api.md").read_text()
