"""Turns of a session: when they are sent, what their prompts carry, and who else may leave early."""

import dataclasses
import json
from collections.abc import Mapping

import numpy as np
import pytest

from tests.replay.engine import HEAD, Script, chunked, event, running, usage
from tests.replay.test_timeline import LOAD, PLAN, play, within
from tests.replay.traces import trace
from tuner.records import Slice, Slo
from tuner.replay.timeline import Partial, Replayed, measure, replay
from tuner.traffic.trace import STATUSES

ALL = Slice(name="all", start_s=0.0, duration_s=1.0)
PLAIN = dataclasses.replace(PLAN, warmup_waves=0, load_warmup_s=0.0)


def chat(arrivals: list[float], **columns: object) -> dict[str, object]:
    """Columns of one session: every row answers the row before."""
    count = len(arrivals)
    return {"session": [1] * count, "parent": [*range(-1, count - 1)], "turn": [*range(count)], **columns}


@pytest.mark.parametrize("history", ["open", "session"])
def test_a_turn_waits_for_its_parent_and_the_users_thought(history: str) -> None:
    traffic = trace([0.0, 0.1, 0.2], **chat([0, 0, 0], think_s=[np.nan, 0.25, 0.0]))  # type: ignore[arg-type]
    load = dataclasses.replace(LOAD, history=history)  # type: ignore[arg-type]
    replayed, _ = within(play(Script(first_s=0.3), traffic, ALL, plan=PLAIN, load=load))
    first, second, third = sorted(replayed.slices[0].outcomes, key=lambda o: o.row)
    assert all(o.ok for o in (first, second, third))
    if history == "open":
        assert [second.scheduled_s, third.scheduled_s] == pytest.approx([0.1, 0.2])
        return
    assert first.end_s is not None
    assert second.end_s is not None
    assert second.scheduled_s == pytest.approx(first.end_s + 0.25)
    assert third.scheduled_s == pytest.approx(second.end_s)
    assert second.sent_s is not None
    assert second.sent_s >= second.scheduled_s
    assert replayed.fidelity.values["planned"] == 3


def test_a_judge_is_not_told_that_a_turn_waits_before_it_is_due() -> None:
    traffic = trace([0.0, 0.01, 0.02], **chat([0, 0, 0]))  # type: ignore[arg-type]
    load = dataclasses.replace(LOAD, history="session")
    seen: list[int] = []

    def judge(partial: Partial) -> str | None:
        seen.append(len(partial.waiting_s))
        return None

    async def go() -> Replayed:
        async with running(Script(first_s=0.5)) as engine:
            return await replay(engine, traffic, [ALL], PLAIN, load, judge=judge)

    assert len(within(go()).slices[0].outcomes) == 3
    assert max(seen) <= 1


def test_a_session_stays_with_one_sender() -> None:
    count = 12
    parents = [-1 if k < 4 else k - 4 for k in range(count)]
    traffic = trace(np.arange(count) * 0.05, parent=parents, session=[k % 4 for k in range(count)])
    load = dataclasses.replace(LOAD, history="session", senders=2)
    replayed, _ = within(play(Script(), traffic, ALL, plan=PLAIN, load=load))
    assert [o.ok for o in replayed.slices[0].outcomes] == [True] * count
    assert replayed.fidelity.values["senders"] == 2
    assert not replayed.fidelity.failed


def with_ids(number: int, body: Mapping[str, object]) -> list[bytes | None]:
    """Answers with token ids 900, 901, ... as vLLM does where it is asked for them."""
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    said = []
    for done in range(1, int(str(body["max_tokens"])) + 1):
        choice: dict[str, object] = {"index": 0, "text": ""}
        if body.get("return_token_ids"):
            choice["token_ids"] = [899 + done]
        said.append(chunked(event({"choices": [choice], "usage": usage(len(prompt), done)})))
    last = event({"choices": [], "usage": usage(len(prompt), int(str(body["max_tokens"])))})
    return [HEAD, *said, chunked(last), chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]


def test_a_live_history_carries_what_the_engine_answered() -> None:
    columns = chat([0, 0, 0], think_s=[np.nan, 0.0, 0.0])
    traffic = trace([0.0, 0.1, 0.2], inputs=[10, 18, 40], outputs=[3, 2, 1], **columns)  # type: ignore[arg-type]
    load = dataclasses.replace(LOAD, history="live")
    replayed, engine = within(play(Script(behave=with_ids), traffic, ALL, plan=PLAIN, load=load))
    prompts = [body["prompt"] for body in engine.bodies[:3]]
    assert [len(p) for p in prompts if isinstance(p, list)] == [10, 18, 40]
    first, second, third = (json.loads(json.dumps(p)) for p in prompts)
    assert second[:13] == [*first, 900, 901, 902]
    assert third[:20] == [*second, 900, 901]
    assert not replayed.fidelity.failed
    assert "return_token_ids" not in engine.bodies[2], "nobody waits for the last turn"


def test_a_turn_whose_parent_failed_is_sent_as_recorded() -> None:
    def first_fails(number: int, body: Mapping[str, object]) -> list[bytes | None]:
        return [b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"] if number == 0 else with_ids(number, body)

    traffic = trace([0.0, 0.1], inputs=[10, 18], outputs=3, **chat([0, 0]))  # type: ignore[arg-type]
    load = dataclasses.replace(LOAD, history="live")
    replayed, engine = within(play(Script(behave=first_fails), traffic, ALL, plan=PLAIN, load=load))
    assert [o.ok for o in replayed.slices[0].outcomes] == [False, True]
    prompt = engine.bodies[1]["prompt"]
    assert isinstance(prompt, list)
    assert len(prompt) == 18


def test_a_turn_that_never_came_due_is_accounted_for() -> None:
    traffic = trace([0.0, 0.1], **chat([0, 0], think_s=[np.nan, 3600.0]))  # type: ignore[arg-type]
    plan = dataclasses.replace(PLAIN, tail_limit_s=0.3)
    load = dataclasses.replace(LOAD, history="session")
    replayed, _ = within(play(Script(), traffic, ALL, plan=plan, load=load))
    first, second = replayed.slices[0].outcomes
    assert first.ok
    assert second.error is not None
    assert "not sent" in second.error
    assert replayed.fidelity.values["lost"] == 0


def test_recorded_cancellations_are_replayed_and_count_in_nothing() -> None:
    cancelled = STATUSES.index("cancelled")
    traffic = trace(
        [0.0, 0.1, 0.2], status=[0, cancelled, 0], obs_e2e_s=[np.nan, 0.1, np.nan], outputs=[2, 5, 2]
    )
    script = Script(behave=lambda number, body: None if body["max_tokens"] == 2 else [None])
    replayed, engine = within(play(script, traffic, ALL, plan=PLAIN))
    assert [o.ok for o in replayed.slices[0].outcomes] == [True, False, True]
    assert engine.bodies[1]["max_tokens"] == 4 * 5 + 256, "or a fast engine ends before the client leaves"
    assert replayed.fidelity.values["cancelled"] == 1
    values = measure(replayed, Slo()).values
    assert values["requests"] == 2
    assert values["failed"] == 0
    assert values["slo_attainment"] == 1
