"""What someone without a token can do over the network, or as another user of the host."""

import asyncio
import json
import threading
from datetime import timedelta
from typing import Any

import pytest

from tests.service.world import World
from tuner.errors import Unavailable
from tuner.service import auth
from tuner.service.auth import Attempts
from tuner.service.pages.session import COOKIE


@pytest.mark.parametrize("header", ["forwarded", "via", "x-forwarded-for", "x-forwarded-proto", "x-real-ip"])
def test_20_attack_clients_of_a_proxy_on_this_host_are_not_this_host(world: World, header: str) -> None:
    """A proxy gives its own requests a loopback address, and often a loopback name as Host."""
    client, sent = world.client(), {header: "192.0.2.7"}
    assert client.get("/v1/runs", headers=sent).status_code == 401
    assert client.get("/", headers=sent, follow_redirects=False).status_code == 303
    assert client.post("/v1/traces/uploads/" + "0" * 32 + "/finish", headers=sent).status_code == 401


@pytest.mark.parametrize(
    "sent",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_20_attack_another_site_changes_nothing_while_this_host_is_trusted(
    world: World, sent: dict[str, str]
) -> None:
    """A page elsewhere can make a browser send a request without a body, or with a form's."""
    for where in ("/v1/runs/0a1b/cancel", "/v1/traces/uploads/" + "0" * 32 + "/finish", "/v1/studies"):
        assert world.client().post(where, headers=sent).status_code == 401, where
        assert world.client().post(where).status_code in (404, 422)
    assert world.client().get("/", headers=sent).status_code == 200, "a link from there may be opened"


@pytest.mark.parametrize(
    "origin", ["http://[", "http://[::1", "//", "", "\\", "http://localhost@evil.example"]
)
def test_20_attack_an_origin_that_is_none_is_refused(world: World, origin: str) -> None:
    world.token("read")
    given = world.client().post("/login", headers={"origin": origin}, data={"token": "x"})
    assert given.status_code == 403


@pytest.mark.parametrize("path", ["/studies/", "/v1/runs/", "/history/?node=n1"])
def test_20_attack_a_redirect_stays_on_this_site(world: World, path: str) -> None:
    client = world.client(host="evil.example")
    given = client.get(path, follow_redirects=False)
    assert given.status_code == 307
    assert given.headers["location"] == path.replace("/?", "?").rstrip("/")


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("<b>\x1b[2J" + "a" * 9000, ""),
        ("a\x85b", ""),
    ],
)
def test_20_attack_an_address_is_an_address_in_the_audit(world: World, sent: str, kept: str) -> None:
    world.token("read")

    async def asked() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/runs", "query_string": b"",
                 "headers": [(b"authorization", b"Bearer no")], "client": (sent, 1)}  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            assert message.get("status", 401) == 401

        await world.app(scope, receive, send)

    asyncio.run(asked())
    (entry,) = (each for each in world.store.audit() if each.action == "login.failed")
    assert dict(entry.detail) == ({"client": kept} if kept else {})


def test_20_attack_addresses_of_one_mapped_network_do_not_lock_out_each_other(world: World) -> None:
    """::ffff:192.0.2.7 and ::ffff:192.0.2.8 share the first 64 bits, as all of IPv4 does."""
    attempts = Attempts(world.clock, most=1, span=timedelta(minutes=1))
    attempts.failed(auth.client_of(_from("::ffff:192.0.2.7")))
    assert attempts.wait_s(auth.client_of(_from("::ffff:192.0.2.7"))) == 60
    assert attempts.wait_s(auth.client_of(_from("::ffff:192.0.2.8"))) == 0


def _from(address: str) -> Any:
    from starlette.requests import Request

    return Request({"type": "http", "headers": [], "client": (address, 1)})


def test_20_attack_a_path_is_short_and_plain_in_log_and_audit(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.token("read")
    path = "/v1/aliases/%1b%5B2J%0Aevil%E2%80%AE" + "a" * 5000
    world.client().get(path, headers={"authorization": "Bearer nothing"})
    (entry,) = (each for each in world.store.audit() if each.action == "login.failed")
    assert entry.target.isascii()
    assert entry.target.isprintable()
    assert len(entry.target) <= 200
    assert entry.target.startswith("/v1/aliases/%1B%5B2J")
    assert "\x1b" not in caplog.text


def test_20_attack_failures_of_any_number_of_addresses_fill_no_audit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.token("read")
    here = world.app.state.service
    for number in range(300):
        here.refused(f"192.0.{number // 250}.{number % 250}", "/v1/runs")
    failed = [each for each in world.store.audit(limit=1000) if each.action == "login.failed"]
    assert len(failed) == 200
    world.clock.forward(hours=1)
    here.login_failed("198.51.100.1")
    assert len([each for each in world.store.audit(limit=1000) if each.action == "login.failed"]) == 201


def test_20_attack_a_client_that_leaves_is_no_error_of_the_service(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def asked() -> list[int]:
        answers: list[int] = []
        parts = iter([{"type": "http.request", "body": b"token=", "more_body": True}])

        async def receive() -> Any:
            return next(parts, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            answers.extend([message["status"]] if "status" in message else [])

        scope = {"type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": []}
        await world.app(scope, receive, send)
        return answers

    assert asyncio.run(asked()) == [400]
    assert "Traceback" not in caplog.text
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_20_attack_the_openapi_document_is_written_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client()
    first = client.get("/v1/openapi.json")
    assert first.json() == world.app.openapi()
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("it was written again"))
    assert client.get("/v1/openapi.json").content == first.content


@pytest.mark.parametrize("path", ["/nothing", "/studies/0a1b", "/studies/0a1b?x=" + "a" * 3000])
def test_20_attack_an_error_page_reads_the_history_in_a_thread(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Who asks for pages that do not exist must not stop every other request while the database is slow."""
    loops: list[bool] = []
    before = world.store.change_token

    def read() -> int:
        try:
            asyncio.get_running_loop()
            loops.append(True)
        except RuntimeError:
            loops.append(threading.current_thread() is threading.main_thread())
        return before()

    monkeypatch.setattr(world.store, "change_token", read)
    client = world.client()
    for cookie in (f"{COOKIE}=x", ""):
        headers = {"accept": "text/html", "cookie": cookie}
        assert client.get(path, headers=headers, follow_redirects=False).status_code >= 300
    assert loops
    assert not any(loops)


def test_20_attack_an_error_of_the_database_does_not_name_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusals named its user, host and driver's words, also to who had no token."""
    world.token("read")
    words = "database postgresql://owner@db7.example/t failed: connection to server at 10.0.0.5 refused"

    def fails(*_: object, **__: object) -> int:
        raise Unavailable(words)

    for name in ("change_token", "verify_token", "tokens", "add_audit"):
        with monkeypatch.context() as here:
            here.setattr(world.store, name, fails)
            here.setattr(world.store.database, "check", fails)
            client = world.client()
            answers = [client.get("/readyz"), client.get("/"), client.get("/v1/runs"), client.get("/nothing")]
            answers += [client.get("/v1/runs", headers={"authorization": f"Bearer {name}"})]
            answers += [client.post("/v1/studies", headers={"authorization": f"Bearer {name} x"})]
            answers += [client.post("/login", data={"token": name})]
        assert not [each.text for each in answers if "db7.example" in each.text or "10.0.0.5" in each.text]
        assert answers[0].status_code == 503
    assert "db7.example" in caplog.text
