"""Facts of engines as the shipped data knows them."""

from packaging.version import Version

from tuner.knobs.catalogue import table
from tuner.knobs.discover import GpuKind, Platform, facts_of_version
from tuner.records import EngineFacts

H100 = GpuKind(name="NVIDIA H100 80GB HBM3", memory_gib=79.6, count=8)
DRIVEN = [name for name in table().versions if Version(name) >= Version("0.10")]
OLDER = [name for name in table().versions if Version(name) < Version("0.10")]


def engine(version: str = "0.32.0", platform: Platform = "cuda") -> EngineFacts:
    """An engine of that release, on eight H100s unless it has no GPU."""
    return facts_of_version(version, platform, gpu=H100 if platform == "cuda" else None)
