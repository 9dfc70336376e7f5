"""Whether a replay can be trusted: values for the report, and gates that make a trial invalid.

A gate checks the tuner's own sending and counting, not the engine's speed. If it fails, the trial is ABORTED,
and its sentence says what to change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tuner.measures import many
from tuner.metrics import CANCELLED
from tuner.records import Fidelity, Outcome
from tuner.replay.plan import Plan, SendSchedule
from tuner.replay.sender import Sent
from tuner.traffic.statistics import dispersion
from tuner.traffic.structure import predicted_hits
from tuner.traffic.trace import Trace

# A warning, no gate: a server that accepts connections slowly adds that to TTFT, as for its other clients.
SLOW_ACCEPT_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a replay gathered about itself. `planned`: counted jobs; `cpu`: a core's share, busiest sender."""

    sent: Sequence[Sent]
    planned: int
    cpu: float
    curtailed: bool = False
    extra: Mapping[str, float | None] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class PrefixCounts:
    """Prompt tokens of answered requests whose cached tokens the engine reported: all, cached, predicted."""

    tokens: int = 0
    cached: int = 0
    predicted: int = 0

    def add(
        self,
        trace: Trace,
        sent: tuple[NDArray[np.int64], SendSchedule],
        outcomes: Sequence[Outcome],
        engine: tuple[int, int | None],
    ) -> None:
        """Count one slice: `sent` are the primed rows and the schedule, `engine` its block size and KV
        capacity in tokens. The prediction does not know that filler and warm-up, which have other tokens,
        push blocks out.
        """
        told = {o.row: o for o in outcomes if o.ok and o.cached_tokens is not None}
        if not told or not len(trace.blocks):
            return
        primed, timetable = sent
        own = timetable.filler == 0
        rows = np.concatenate([primed, timetable.rows[own]])
        counted = np.concatenate([np.zeros(len(primed), bool), timetable.measured[own]])
        found = predicted_hits(trace, rows, engine[0], engine[1])
        for row, hits in zip(rows[counted].tolist(), found[counted].tolist(), strict=True):
            if (outcome := told.get(row)) is not None:
                self.tokens += outcome.input_tokens
                self.cached += outcome.cached_tokens or 0
                self.predicted += hits

    def values(self) -> dict[str, float | None]:
        """Shares for the fidelity report; empty if the engine reported none."""
        if not self.tokens:
            return {}
        return {
            "prefix_cached_share": self.cached / self.tokens,
            "prefix_predicted_share": self.predicted / self.tokens,
        }


def check(evidence: Evidence, plan: Plan) -> Fidelity:
    """The fidelity report with its gates applied."""
    outcomes = [sent.outcome for sent in evidence.sent if sent.counted]
    values: dict[str, float | None] = {"requests": float(len(outcomes)), "planned": float(evidence.planned)}
    failed: list[str] = []
    warnings = list(evidence.warnings)
    _lateness(outcomes, plan, values, failed, warnings)
    _arrivals(outcomes, values)
    _tokens(outcomes, plan, values, failed)
    _conservation(evidence, values, failed)
    values["sender_cpu"] = evidence.cpu
    if evidence.cpu > plan.sender_cpu:
        failed.append(
            f"sender_cpu: a sender used {evidence.cpu:.0%} of its core (allowed {plan.sender_cpu:.0%}): "
            "use more senders or lower the speed"
        )
    _wire(evidence.sent, values, warnings)
    values.update(evidence.extra)
    return Fidelity(values=values, failed=tuple(failed), warnings=tuple(warnings))


def _lateness(
    outcomes: Sequence[Outcome],
    plan: Plan,
    values: dict[str, float | None],
    failed: list[str],
    warnings: list[str],
) -> None:
    late = np.array([(o.sent_s - o.scheduled_s) * 1000 for o in outcomes if o.sent_s is not None])
    if len(late) == 0:
        return
    p99 = float(np.percentile(late, 99))
    values["lateness_p50_ms"] = float(np.percentile(late, 50))
    values["lateness_p99_ms"] = p99
    values["lateness_max_ms"] = float(late.max())
    values["late_over_10ms"] = float((late > 10).mean())
    ttft = [
        (o.first_token_s - o.scheduled_s) * 1000 for o in outcomes if o.ok and o.first_token_s is not None
    ]
    allowed = max(plan.lateness_ms, plan.lateness_share * float(np.median(ttft)) if ttft else 0.0)
    values["lateness_allowed_ms"] = allowed
    if p99 > allowed:
        failed.append(
            f"lateness: requests were sent {p99:.1f} ms late at p99 (allowed {allowed:.1f} ms): give "
            f"the sender its own core, use more senders, or stop other programs on this host"
        )
    elif p99 > 2.0:
        warnings.append(f"requests were sent {p99:.1f} ms late at p99")


def _arrivals(outcomes: Sequence[Outcome], values: dict[str, float | None]) -> None:
    """How uneven the arrivals were, as planned and as sent: variance by mean of their counts."""
    sent = [o for o in outcomes if o.sent_s is not None]
    times = {
        "planned": np.sort([o.scheduled_s for o in sent]),
        "sent": np.sort([o.sent_s for o in sent if o.sent_s is not None]),
    }
    for kind, at in times.items():
        for window in (1, 10):
            values[f"dispersion_{window}s_{kind}"] = dispersion(at, window) if len(at) else None


def _tokens(
    outcomes: Sequence[Outcome], plan: Plan, values: dict[str, float | None], failed: list[str]
) -> None:
    answered = [o for o in outcomes if o.ok]
    wrong = [o for o in answered if o.input_tokens != o.expected_input]
    values["prompt_mismatches"] = float(len(wrong))
    if wrong:
        first = wrong[0]
        failed.append(
            f"prompt_tokens: the engine counted {first.input_tokens} prompt tokens, but "
            f"{first.expected_input} were sent (row {first.row}; {many(len(wrong), 'row')}): "
            "something changes the prompts. Send to the engine directly, without added special tokens"
        )
    if not answered:
        return
    short = [o for o in answered if o.output_tokens != o.expected_output]
    share = len(short) / len(answered)
    values["completion_mismatch"] = share
    if share > plan.completion_mismatch:
        first = short[0]
        failed.append(
            f"completion_tokens: {share:.1%} of the answers did not have the recorded length"
            f" (row {first.row}: {first.output_tokens} of {first.expected_output}; allowed"
            f" {plan.completion_mismatch:.1%}): raise max_model_len above prompt + answer, or drop the rows"
            " that do not fit"
        )


def _conservation(evidence: Evidence, values: dict[str, float | None], failed: list[str]) -> None:
    counted = [s.outcome for s in evidence.sent if s.counted]
    answered = sum(o.ok for o in counted)
    values["answered"] = float(answered)
    cancelled = sum(o.error == CANCELLED for o in counted)
    values["cancelled"] = float(cancelled)
    values["failed"] = float(len(counted) - answered - cancelled)
    lost = evidence.planned - len(counted)
    values["lost"] = float(lost)
    if lost and not evidence.curtailed:
        failed.append(
            f"conservation: {len(counted)} of {many(evidence.planned, 'planned request')} have a "
            f"result, because the sender was stopped or failed: repeat the trial"
        )


def _wire(sent: Sequence[Sent], values: dict[str, float | None], warnings: list[str]) -> None:
    """What the wire knows: waits for a connection, resends, chunks per token, our TTFT against the engine's
    own. A server that is slow to accept is the engine's fault: it counts in TTFT, and voids nothing."""
    waits = np.array([s.waited_s * 1000 for s in sent if s.counted and s.outcome.sent_s is not None])
    if len(waits):
        p99 = float(np.percentile(waits, 99))
        values["connect_wait_p99_ms"] = p99
        values["connect_wait_max_ms"] = float(waits.max())
        if p99 > SLOW_ACCEPT_MS:
            warnings.append(
                f"requests waited {p99:.0f} ms at p99 for the engine's server to take their connection"
            )
    counted = [s for s in sent if s.counted and s.outcome.ok]
    values["resent"] = float(sum(s.resent for s in sent))
    tokens = sum(int(s.outcome.chunk_tokens.sum()) for s in counted)
    if tokens:
        values["chunks_per_token"] = sum(len(s.outcome.chunk_s) for s in counted) / tokens
    silences = [float(np.diff(s.outcome.chunk_s).max()) * 1000 for s in counted if len(s.outcome.chunk_s) > 1]
    if silences:
        values["silence_p99_ms"], values["silence_max_ms"] = float(np.percentile(silences, 99)), max(silences)
    gaps = ttft_gaps_ms(counted)
    if len(gaps):
        values["engine_ttft_gap_p50_ms"] = float(np.percentile(gaps, 50))
        values["engine_ttft_gap_p99_ms"] = float(np.percentile(gaps, 99))


def ttft_gaps_ms(sent: Sequence[Sent]) -> NDArray[np.float64]:
    """Our TTFT from the send, less queue and first-token time as the engine reports them per request."""
    gaps = []
    for one in sent:
        engine, outcome = one.engine.get("time_to_first_token_ms"), one.outcome
        if engine is None or outcome.first_token_s is None or outcome.sent_s is None:
            continue
        ours = (outcome.first_token_s - outcome.sent_s) * 1000
        gaps.append(ours - engine - one.engine.get("queue_time_ms", 0.0))
    return np.array(gaps, dtype=np.float64)
