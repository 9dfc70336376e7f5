"""How thoroughly to measure (Plan) and what to send (Load)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from tuner.records import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Warm-up, priming, window, tail, repeats and gates. Seconds, unless the name says otherwise.

    `slices` and `slice_s` are what `slices: auto` chooses. `finalists` is how many candidates the
    confirmation measures again beside the baseline; each is launched `repeats` times, and up to
    `most_repeats` times while the result is open. Priming sends `priming_turnovers` × the KV capacity in
    tokens. The lateness gate is p99 ≤ max(`lateness_ms`, `lateness_share` × median TTFT). The numbers of a
    `demonstration` plan are too short to act on.
    """

    name: str
    slices: int
    slice_s: float
    repeats: int
    most_repeats: int
    finalists: int = 2
    warmup_waves: int
    warmup_requests: int
    warmup_agreement: float = 0.2
    warmup_limit_s: float
    warmup_tokens: int
    priming_turnovers: float
    priming_limit_s: float
    priming_concurrency: int = 16
    load_warmup_s: float
    tail_limit_s: float
    scrape_s: float = 1.0
    lateness_ms: float = 5.0
    lateness_share: float = 0.05
    completion_mismatch: float = 0.005
    sender_cpu: float = 0.8
    demonstration: bool = False

    @property
    def most(self) -> int:
        """How often each configuration of a confirmation is launched at most."""
        return max(self.repeats, self.most_repeats)


PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "quick": Plan(
            name="quick", slices=1, slice_s=3.0, repeats=2, most_repeats=3, finalists=1, demonstration=True,
            warmup_waves=2, warmup_requests=4, warmup_tokens=4, warmup_limit_s=1.0,
            priming_turnovers=0.25, priming_limit_s=0.5,
            load_warmup_s=0.5, tail_limit_s=5.0, scrape_s=0.25,
            lateness_ms=100.0, lateness_share=0.25, sender_cpu=0.95,
        ),
        "brief": Plan(
            name="brief", slices=1, slice_s=10.0, repeats=3, most_repeats=6,
            warmup_waves=2, warmup_requests=4, warmup_tokens=4, warmup_limit_s=2.0,
            priming_turnovers=0.25, priming_limit_s=1.0,
            load_warmup_s=0.5, tail_limit_s=10.0, scrape_s=0.5,
            lateness_ms=50.0, lateness_share=0.1, sender_cpu=0.95,
        ),
        "standard": Plan(
            name="standard", slices=3, slice_s=60.0, repeats=3, most_repeats=6,
            warmup_waves=5, warmup_requests=64, warmup_tokens=16, warmup_limit_s=120.0,
            priming_turnovers=1.0, priming_limit_s=180.0,
            load_warmup_s=20.0, tail_limit_s=90.0,
        ),
        "thorough": Plan(
            name="thorough", slices=3, slice_s=300.0, repeats=5, most_repeats=8,
            warmup_waves=8, warmup_requests=256, warmup_tokens=32, warmup_limit_s=600.0,
            priming_turnovers=1.5, priming_limit_s=900.0,
            load_warmup_s=60.0, tail_limit_s=300.0,
        ),
    }
)  # fmt: skip

Causality = Literal["open", "session", "live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent: seed, number and repeat make the prompts' salt.

    `speed` 2.0 sends the same rows twice as fast. `kv_tokens` is the largest KV capacity among the candidates
    (None: this engine's). `deadline_s` None = max(60 s, 4 × the SLO's E2E limit). `history`: open = every row
    at its recorded time, session = a turn waits for its parent's answer and the think time, live = session,
    and the prompt carries the tokens that the engine answered. `isolated` skips the lock of the host.
    `realtime` asks the kernel for real-time priority of the senders; the report says whether it was granted.
    """

    seed: int
    number: int
    repeat: int = 0
    speed: float = 1.0
    model: str
    vocabulary: int
    slo: Slo = field(default_factory=Slo)
    deadline_s: float | None = None
    kv_tokens: int | None = None
    history: Causality = "open"
    replay_cancellations: bool = True
    senders: int = 1
    cores: tuple[int, ...] | None = None
    isolated: bool = False
    realtime: bool = False

    @property
    def deadline(self) -> float:
        """Seconds after its scheduled time at which a request counts as failed."""
        if self.deadline_s is not None:
            return self.deadline_s
        return max(60.0, 4 * (self.slo.e2e_ms or 0.0) / 1000)
