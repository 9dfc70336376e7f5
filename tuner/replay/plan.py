"""How thoroughly to measure (Plan) and what to send (Load)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from tuner.records import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how often is measured, and which replay is believed."""

    name: str
    """What the study file calls it."""
    slices: int
    """how many slices `slices: auto` takes for the search"""
    slice_s: float
    """seconds of a slice that `slices: auto` takes"""
    repeats: int
    """how often the confirmation launches each configuration at first"""
    most_repeats: int
    """how often at most, while the answer is open"""
    finalists: int = 2
    """how many candidates the confirmation measures beside the baseline"""
    warmup_waves: int
    """waves of warm-up requests at most"""
    warmup_requests: int
    """requests in a wave"""
    warmup_agreement: float = 0.2
    """the warm-up ends when the median TTFT of two waves differs by no more than this share"""
    warmup_limit_s: float
    """seconds of warm-up at most"""
    warmup_tokens: int
    """tokens that a warm-up request answers"""
    priming_turnovers: float
    """how often priming fills the KV cache, counted in tokens"""
    priming_limit_s: float
    """seconds of priming at most"""
    priming_concurrency: int = 16
    """priming requests at once"""
    load_warmup_s: float
    """seconds of recorded traffic that are sent before a slice is measured"""
    tail_limit_s: float
    """seconds that requests of a slice may take after its end"""
    scrape_s: float = 1.0
    """seconds between two readings of the engine's metrics"""
    lateness_ms: float = 5.0
    """requests may be sent so many milliseconds late (p99) …"""
    lateness_share: float = 0.05
    """… or this share of the median TTFT, whichever is more"""
    completion_mismatch: float = 0.005
    """share of the answers that may have another length than the trace says"""
    sender_cpu: float = 0.8
    """share of a core that the busiest sender may use"""
    attribution: float = 0.3
    """share of the search\'s GPU-seconds that finding out which knobs pay may take; 0: it is not asked"""
    demonstration: bool = False
    """Its numbers are to be looked at, not acted on."""

    @property
    def most(self) -> int:
        """How often each configuration of a confirmation is launched at most."""
        return max(self.repeats, self.most_repeats)


PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "quick": Plan(
            name="quick", slices=1, slice_s=3.0, repeats=2, most_repeats=3, finalists=1, demonstration=True,
            attribution=0.0,
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
