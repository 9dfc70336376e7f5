"""Who may do what: every route of the app against every scope, and against none."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from starlette.testclient import TestClient

from tests.history.fill import fill
from tests.service.world import World
from tuner.history.entities import SCOPES
from tuner.service.auth import INCLUDES, Requires

PUBLIC = {("GET", "/healthz"), ("GET", "/readyz")}
NEEDS = {
    "read": {
        "GET /metrics",
        "GET /v1/aliases",
        "GET /v1/aliases/{alias}",
        "GET /v1/aliases/{alias}/events",
        "GET /v1/history",
        "GET /v1/nodes",
        "GET /v1/nodes/{name}",
        "GET /v1/profiles",
        "GET /v1/profiles/resolve",
        "GET /v1/profiles/{profile_id}",
        "GET /v1/profiles/{profile_id}/diff",
        "GET /v1/profiles/{profile_id}/export",
        "GET /v1/runs",
        "GET /v1/runs/{run_id}",
        "GET /v1/runs/{run_id}/events",
        "GET /v1/schedules",
        "GET /v1/schedules/{name}",
        "GET /v1/studies",
        "GET /v1/studies/{ref}",
        "GET /v1/studies/{ref}/front",
        "GET /v1/studies/{ref}/trials",
        "GET /v1/traces",
        "GET /v1/traces/uploads/{upload_id}",
        "GET /v1/traces/{ref}",
        "GET /v1/trials/{trial_id}",
    },
    "run": {
        "POST /v1/comparisons",
        "POST /v1/upgrade-checks",
        "DELETE /v1/schedules/{name}",
        "DELETE /v1/traces/uploads/{upload_id}",
        "PATCH /v1/traces/uploads/{upload_id}",
        "POST /v1/runs",
        "POST /v1/runs/{run_id}/cancel",
        "POST /v1/studies",
        "POST /v1/traces/uploads",
        "POST /v1/traces/uploads/{upload_id}/finish",
        "PUT /v1/schedules/{name}",
    },
    "promote": {
        "POST /v1/aliases/{alias}/freeze",
        "POST /v1/aliases/{alias}/rollback",
        "PUT /v1/aliases/{alias}",
    },
    "admin": {"GET /v1/audit", "PUT /v1/nodes/{name}/state"},
}
"""What docs/api.md promises; a route that is not here fails the test."""
PATH = {
    "alias": "champion",
    "name": "nightly",
    "profile_id": "1",
    "run_id": "0",
    "ref": "chat",
    "trial_id": "1",
    "upload_id": "0" * 32,
}


@dataclass(frozen=True)
class Route:
    """One route of the app, however FastAPI nests it."""

    method: str
    path: str
    in_schema: bool
    dependant: Dependant


def every_route(world: World) -> Iterator[Route]:
    """Every route of the app: of routers that were included too."""
    for outer in world.app.routes:
        nested = getattr(outer, "effective_candidates", None)
        routes: list[Any] = list(nested()) if nested else [outer]
        for route in routes:
            dependant = getattr(route, "dependant", None)
            if dependant is None:
                assert route.path == "/v1/openapi.json", f"{route.path} is not seen by this test"
                continue
            for method in route.methods:
                yield Route(method, route.path, route.include_in_schema, dependant)


def api_routes(world: World) -> list[Route]:
    """Those of the API; pages have tests of their own."""
    return [route for route in every_route(world) if route.in_schema]


def scopes_of(dependant: Dependant) -> set[str]:
    found = {dependant.call.scope} if isinstance(dependant.call, Requires) else set()
    return found.union(*(scopes_of(each) for each in dependant.dependencies))


def ask(client: TestClient, method: str, path: str, token: str | None) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return client.request(method, path.format(**PATH), headers=headers).status_code


def test_every_route_asks_for_the_scope_that_is_documented(world: World) -> None:
    found: dict[str, set[str]] = {scope: set() for scope in SCOPES}
    for route in api_routes(world):
        scopes = scopes_of(route.dependant)
        if (route.method, route.path) in PUBLIC:
            assert not scopes
            continue
        assert len(scopes) == 1, f"{route} asks for {scopes or 'nothing'}"
        found[scopes.pop()].add(f"{route.method} {route.path}")
    assert found == NEEDS


def test_every_route_of_the_app_is_in_the_schema_or_a_page(world: World) -> None:
    paths = {route.path for route in api_routes(world)}
    assert paths == set(world.app.openapi()["paths"])
    others = {route.path for route in every_route(world)} - paths
    assert not {path for path in others if path.startswith("/v1")}


@pytest.mark.slow
@pytest.mark.parametrize("held", [*SCOPES, "none", "unknown", "revoked", "expired", "basic"])
def test_matrix(tmp_path: Path, held: str) -> None:
    """Every route with one kind of token: 401, 403, or neither."""
    world = World(tmp_path, loopback=False)
    fill(world.store)
    token = world.token(held if held in SCOPES else "admin", days=1)
    client = world.client()
    if held == "none":
        token = ""
    elif held == "unknown":
        token += "x"
    elif held == "revoked":
        world.store.revoke_token(token.split("_")[1], now=world.clock())
    elif held == "expired":
        world.clock.forward(days=1)
    elif held == "basic":
        client.headers["Authorization"] = "Basic dTpw"
        token = ""
    allowed = INCLUDES.get(held, set())
    asked = 0
    for needed, routes in NEEDS.items():
        for each in routes:
            method, _, path = each.partition(" ")
            status = ask(client, method, path, token or None)
            wanted = 401 if held not in SCOPES else 403 if needed not in allowed else None
            if wanted is not None:
                assert status == wanted, f"{each} with {held}: {status}"
            else:
                assert status < 500, f"{each} with {held}: {status}"
                assert status not in (401, 403), f"{each} with {held}: {status}"
            asked += 1
    for method, path in PUBLIC:
        assert ask(client, method, path, token or None) == 200
    assert asked == len(api_routes(world)) - len(PUBLIC)
    world.store.close()


def test_without_a_token_this_host_is_trusted_until_one_exists(world: World) -> None:
    client = world.client()
    assert client.get("/v1/runs").status_code == 200
    token = world.token("read")
    assert client.get("/v1/runs").status_code == 401
    world.store.revoke_token(token.split("_")[1], now=world.clock())
    assert client.get("/v1/runs").status_code == 401


def test_a_page_that_rebinds_its_name_to_loopback_is_not_this_host(world: World) -> None:
    assert world.client(host="evil.example").get("/v1/runs").status_code == 401
    assert world.client(host="127.0.0.1:8642").get("/v1/runs").status_code == 200
    assert world.client(host="[::1]:8642").get("/v1/runs").status_code == 200


def test_beyond_loopback_nobody_is_trusted_without_a_token(tmp_path: Path) -> None:
    world = World(tmp_path, loopback=False)
    assert world.client().get("/v1/runs").status_code == 401
    world.store.close()


def test_a_token_that_was_good_a_moment_ago_is_not_when_it_was_revoked_elsewhere(world: World) -> None:
    client = world.client("read")
    assert client.get("/v1/runs").status_code == 200
    from tuner.history.store import Store

    elsewhere = Store(world.settings.url)
    elsewhere.revoke_token(elsewhere.tokens()[0].id, now=world.clock())
    elsewhere.close()
    assert client.get("/v1/runs").status_code == 401


def test_last_use_is_kept(world: World) -> None:
    client = world.client("read")
    world.clock.forward(hours=1)
    client.get("/v1/runs")
    assert world.store.tokens()[0].last_used_at == world.clock()


def test_force_needs_admin(filled: World) -> None:
    where = "/v1/aliases/champion?model=Qwen/Qwen2.5-7B-Instruct&target=n1&workload=chat"
    body = {"version": 1, "reason": "must", "force": True}
    refused = filled.client("promote").put(where, json=body, headers={"If-Match": '"2"'})
    assert refused.status_code == 403
    assert filled.client("admin").put(where, json=body, headers={"If-Match": '"2"'}).status_code == 200


@pytest.mark.parametrize("sent", [{}, {"authorization": "Bearer tuner_no"}, {"authorization": "Basic eDp5"}])
def test_20_attack_a_body_is_not_read_before_a_valid_token(world: World, sent: dict[str, str]) -> None:
    world.token("read")
    given = {"host": "localhost", "content-type": "application/json", **sent}
    headers = [(name.encode(), value.encode()) for name, value in given.items()]
    answers: list[int] = []

    async def receive() -> dict[str, Any]:
        pytest.fail("the body was read")

    async def send(message: Any) -> None:
        answers.extend([message["status"]] if "status" in message else [])

    paths = world.app.openapi()["paths"]
    asked = [(path, method.upper()) for path, methods in paths.items() for method in methods]
    for path, method in asked:
        scope = {"type": "http", "method": method, "path": path.replace("{", "").replace("}", ""),
                 "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1)}  # fmt: skip
        if method not in ("GET", "HEAD"):
            asyncio.run(world.app(scope, receive, send))
    assert len(answers) > 12
    assert set(answers) == {401}


@pytest.mark.parametrize(("method", "most"), [("POST", 1), ("PUT", 1), ("PATCH", 16)])
def test_20_attack_json_has_a_mebibyte_at_most(world: World, method: str, most: int) -> None:
    piece = f"/v1/traces/uploads/{'0' * 32}"
    where = {"POST": "/v1/studies", "PUT": "/v1/schedules/x", "PATCH": piece}[method]
    refused = world.client("run").request(method, where, content=b" " * (most * 1024**2 + 1))
    assert refused.status_code == (413 if method != "PATCH" else 422)
