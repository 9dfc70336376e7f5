"""What the target interpreter says of its engine: exact flags, version, platform, devices."""

from tuner.knobs.catalogue import CATALOGUE
from tuner.knobs.versions import table
from tuner.records import EngineFacts

SIMULATED_VERSION = "0.32.0"
"""The vLLM that the simulated engine speaks like."""


def facts_of_version(
    version: str,
    platform: str = "cuda",
    *,
    kind: str = "vllm",
    gpu: tuple[str, float, int] | None = None,
) -> EngineFacts:
    """Facts of a release from shipped data alone; `gpu` is (name, GiB of memory, how many)."""
    name, memory, count = gpu or (None, None, 0)
    facts = EngineFacts(
        kind=kind,  # type: ignore[arg-type]
        version=version,
        platform=platform,  # type: ignore[arg-type]
        flags=table().flags_of(version),
        gpu_name=name,
        gpu_memory_gib=memory,
        gpu_count=count,
    )
    return with_defaults(facts)


def with_defaults(facts: EngineFacts) -> EngineFacts:
    """The facts with the catalogue's default of every knob that this engine has and whose default is known."""
    from dataclasses import replace

    defaults = {
        name: entry.default_for(facts)
        for name, entry in CATALOGUE.items()
        if entry.flag_in(facts) is not None or entry.kind == "preemption"
    }
    return replace(facts, defaults={name: value for name, value in defaults.items() if value is not None})
