"""The whole OpenAPI, fuzzed: no 5xx, no undocumented status, media type or shape.

`TUNER_FUZZ_EXAMPLES` sets how many requests each operation gets at most, twice (2 by default, 150 by hand);
`TUNER_FUZZ_PART=0/4` takes every fourth operation from the first on.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi

from tests.history.fill import fill
from tests.service.world import World, prepare

EXAMPLES = int(os.environ.get("TUNER_FUZZ_EXAMPLES", "2"))
PART, PARTS = (int(word) for word in os.environ.get("TUNER_FUZZ_PART", "0/1").split("/"))
CHECKED = (
    checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
    openapi.response_headers_conformance,
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("fuzzed"))
    fill(world.store)
    prepare(world.home)
    return world


def test_the_whole_schema(fuzzed: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Every operation of the schema, with data made for it and data made against it."""
    schema: Any = schemathesis.openapi.from_asgi("/v1/openapi.json", fuzzed.app)
    token = fuzzed.token("admin", name="fuzz")
    headers = {"Authorization": f"Bearer {token}"}
    statuses: Counter[int] = Counter()
    operations = [found.ok() for found in schema.get_all_operations()]
    taken = operations[PART::PARTS]
    for operation in taken:
        fuzz(operation, headers, statuses)
    with capsys.disabled():
        told = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        print(f"\n{sum(statuses.values())} requests to {len(taken)} operations; by status {told}")
    assert len(operations) == sum(len(methods) for methods in fuzzed.app.openapi()["paths"].values())
    assert not [status for status in statuses if status >= 500]


def fuzz(operation: Any, headers: dict[str, str], statuses: "Counter[int]") -> None:
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for mode in modes:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            response = case.call(headers=headers)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=list(CHECKED))

        if mode is schemathesis.GenerationMode.POSITIVE or takes_anything(operation):
            ask()


def takes_anything(operation: Any) -> bool:
    """Whether there is anything in a request that could be wrong."""
    return bool(list(operation.iter_parameters()) or operation.body)


def test_the_fuzz_sees_what_is_wrong(tmp_path: Path) -> None:
    """A route that breaks its word is found, so that silence of the test above means something."""
    world = World(tmp_path)

    @world.app.get("/v1/broken")
    def broken() -> dict[str, int]:
        return {"nothing": 1 // len(world.store.studies())}

    schema: Any = schemathesis.openapi.from_asgi("/v1/openapi.json", world.app)
    operation = schema["/v1/broken"]["GET"]
    with pytest.raises(BaseException, match=r"Server error|by zero"):
        fuzz(operation, {"Authorization": f"Bearer {world.token('admin')}"}, Counter())
    world.store.close()
