"""The GPUs of this host by NVML: which there are, whether they are free, and samples while we measure."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Protocol, TypeVar

import pynvml

from tuner.engine.failures import failed

T = TypeVar("T")
SLACK_BYTES = 256 << 20
SAMPLES = 3
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"

# NVML clock event reasons that falsify a measurement: hardware slow-down, thermal (both kinds), brake.
THROTTLING = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device (or MIG instance), known by UUID. `index` is its card's place in PCI order."""

    uuid: str
    name: str
    memory_bytes: int
    shared_memory: bool = False
    index: int | None = None
    mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One look at one GPU; None if the device does not report a value."""

    uuid: str
    at_s: float
    used_bytes: int
    utilization: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    throttle: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A process that holds GPU memory, as NVML reports it; in containers pids are the host's, or missing."""

    uuid: str
    pid: int
    memory_bytes: int | None


class Nvml(Protocol):
    """What this room needs of the driver."""

    def gpus(self) -> Sequence[Gpu]: ...
    def sample(self, uuid: str) -> GpuSample: ...
    def users(self, uuid: str) -> Sequence[User]: ...
    def driver(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs that a study may use; empty on a host without any, with the reason in `absent`."""

    nvml: Nvml | None
    gpus: tuple[Gpu, ...] = ()
    absent: str | None = None
    baseline: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        only: Sequence[str] = (),
        nvml: Nvml | None = None,
    ) -> "Gpus":
        """The GPUs that are visible under `env` (the CUDA_VISIBLE_DEVICES of this process if `env` sets
        none). With `only`, just those with these UUIDs. Their used memory now is the baseline.
        """
        if nvml is None:
            nvml, absent = open_driver()
            if nvml is None:
                return cls(nvml=None, absent=absent)
        visible = (env or {}).get(VISIBLE, os.environ.get(VISIBLE))
        seen = select(tuple(nvml.gpus()), visible)
        chosen = tuple(gpu for gpu in seen if not only or gpu.uuid in only)
        if not chosen:
            beside = f", none of {', '.join(only)}" if seen else ""
            return cls(nvml=None, absent=f"no GPU is visible ({VISIBLE}={visible!r}{beside})")
        used = {gpu.uuid: nvml.sample(gpu.uuid).used_bytes for gpu in chosen}
        return cls(nvml=nvml, gpus=chosen, baseline=used)

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self.gpus)

    @property
    def driver(self) -> str | None:
        """The driver's version; None without GPUs."""
        return None if self.nvml is None else self.nvml.driver()

    def sample(self) -> tuple[GpuSample, ...]:
        """One look at each GPU; empty without GPUs."""
        return () if self.nvml is None else tuple(self.nvml.sample(uuid) for uuid in self.uuids)

    def users(self) -> tuple[User, ...]:
        """The processes that hold memory on them, for diagnosis only: decisions use the amount of memory."""
        if self.nvml is None:
            return ()
        return tuple(user for uuid in self.uuids for user in self.nvml.users(uuid))

    def foreign_use(self, limit_bytes: int = 1 << 30) -> str | None:
        """One sentence on GPU memory that was in use before our launch, None when the GPUs are free."""
        for sample in self.sample():
            if sample.used_bytes > limit_bytes and not self._shared(sample.uuid):
                pids = ", ".join(str(u.pid) for u in self.users() if u.uuid == sample.uuid) or "not told"
                return f"{sample.uuid}: {sample.used_bytes / 2**30:.1f} GiB in use (pids: {pids})"
        return None

    def refuse_foreign(self, limit_bytes: int = 1 << 30) -> None:
        """Aborted (cause foreign_use) if GPU memory was in use before our launch."""
        for gpu in self.gpus:
            used = self.baseline.get(gpu.uuid, 0)
            if used > limit_bytes and not gpu.shared_memory:
                raise failed("foreign_use", detail=f"{gpu.uuid}: {used / 2**30:.1f} GiB held").error()

    async def wait_free(
        self,
        baseline: Mapping[str, int] | None = None,
        *,
        timeout_s: float = 120.0,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> float:
        """Wait until used memory is back at the baseline in three samples running. Seconds waited.

        Aborted (cause gpu_dirty) at the timeout. Devices that share memory with the host count as free.
        """
        limits = self.baseline if baseline is None else baseline
        begun, quiet = clock(), 0
        while self.gpus:
            over = [
                s
                for s in self.sample()
                if not self._shared(s.uuid) and s.used_bytes > limits.get(s.uuid, 0) + SLACK_BYTES
            ]
            quiet = 0 if over else quiet + 1
            if quiet >= SAMPLES:
                break
            if over and clock() - begun > timeout_s:
                rest = (over[0].used_bytes - limits.get(over[0].uuid, 0)) / 2**30
                raise failed("gpu_dirty", detail=f"{over[0].uuid}: {rest:.1f} GiB more than at first").error()
            await asyncio.sleep(interval_s)
        return clock() - begun

    def _shared(self, uuid: str) -> bool:
        return any(gpu.shared_memory for gpu in self.gpus if gpu.uuid == uuid)


def select(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """The devices that CUDA shows a process under CUDA_VISIBLE_DEVICES, by its rules.

    The variable names cards by their place in PCI order (the engines are started so that they count the same
    way), or devices by the beginning of their UUID; it does not mix the two. An unknown, ambiguous or empty
    name, or -1, ends the list; a device that is named twice empties it. None means all whole cards. A process
    sees only one MIG instance.
    """
    if visible is None:
        return tuple(gpu for gpu in gpus if not gpu.mig) or gpus[:1]
    words = [part.strip() for part in visible.split(",")]
    by_place = words[0].isdecimal()
    chosen: list[Gpu] = []
    for word in words:
        if word.isdecimal() != by_place:
            break
        if by_place:
            found = [gpu for gpu in gpus if gpu.index == int(word)][:1]
        else:
            found = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return ()
        chosen += found
    return tuple(chosen[:1] if any(gpu.mig for gpu in chosen[:1]) else chosen)


def visible_devices(
    uuids: Sequence[str], gpus: Gpus | None, env: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The environment that shows an engine these devices only; empty for none.

    Devices go by their place in PCI order if it is known, because several vLLM versions cannot read a UUID
    there. A MIG instance goes by UUID; if it is the only device (in a container), nothing is set. A choice
    in `env` (the study's) is kept, and is read in PCI order, as we read it.
    """
    if VISIBLE in env:
        return {ORDER: "PCI_BUS_ID"}
    alone = gpus is not None and gpus.nvml is not None and [gpu.mig for gpu in gpus.nvml.gpus()] == [True]
    if not uuids or (alone and VISIBLE not in os.environ):
        return {}
    known = {gpu.uuid: gpu.index for gpu in gpus.gpus if not gpu.mig} if gpus is not None else {}
    indices = [known.get(uuid) for uuid in uuids]
    if None in indices:
        return {VISIBLE: ",".join(uuids)}
    return {ORDER: "PCI_BUS_ID", VISIBLE: ",".join(str(index) for index in indices)}


class Watch:
    """Samples GPUs in a thread while a window is measured."""

    def __init__(self, gpus: Gpus, *, interval_s: float = 1.0) -> None:
        self.samples: list[GpuSample] = []
        self._gpus = gpus
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        if self._gpus.gpus:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self.samples.extend(self._gpus.sample())
            if self._end.wait(self._interval_s):
                return

    def summary(self) -> dict[str, float]:
        """See `summarize`."""
        return summarize(self.samples)


def summarize(samples: Sequence[GpuSample]) -> dict[str, float]:
    """Measurement names from samples; empty without samples.

    `gpu_memory_gib` (sum of each device's highest), `gpu_utilization` (mean, 0..1), `gpu_energy_j`,
    `gpu_power_mean_w` (of one device), `gpu_temperature_max_c`, `gpu_clock_min_mhz`, `gpu_throttled` (share
    of samples), `gpu_throttle_reasons` (NVML's bits, of all samples).
    """
    if not samples:
        return {}
    uuids = sorted({s.uuid for s in samples})
    found = {
        "gpu_memory_gib": sum(max(s.used_bytes for s in samples if s.uuid == u) for u in uuids) / 2**30,
        "gpu_throttled": sum(bool(s.throttle & THROTTLING) for s in samples) / len(samples),
    }
    found["gpu_throttle_reasons"] = float(reduce(or_, (s.throttle for s in samples)))
    powers = [s.power_w for s in samples if s.power_w is not None]
    if powers:
        found["gpu_power_mean_w"] = sum(powers) / len(powers)
    utilization = [s.utilization for s in samples if s.utilization is not None]
    temperatures = [s.temperature_c for s in samples if s.temperature_c is not None]
    clocks = [s.sm_clock_mhz for s in samples if s.sm_clock_mhz is not None]
    if utilization:
        found["gpu_utilization"] = sum(utilization) / len(utilization)
    if temperatures:
        found["gpu_temperature_max_c"] = max(temperatures)
    if clocks:
        found["gpu_clock_min_mhz"] = min(clocks)
    energy = sum(_energy([s for s in samples if s.uuid == u]) for u in uuids)
    if energy:
        found["gpu_energy_j"] = energy
    return found


def throttled(summary: Mapping[str, float], limit: float = 0.05) -> bool:
    """Whether to flag a window: the card's clocks were lowered for more than that share of it."""
    return summary.get("gpu_throttled", 0.0) > limit


def _energy(samples: Sequence[GpuSample]) -> float:
    """Joules of one device: power times time, trapezoids."""
    pairs = itertools.pairwise(samples)
    return sum(
        (a.power_w + b.power_w) / 2 * (b.at_s - a.at_s)
        for a, b in pairs
        if a.power_w is not None and b.power_w is not None
    )


def open_driver() -> tuple["Driver | None", str | None]:
    """The driver of this host, or None and one sentence that says why there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA driver on this host ({error})"
    try:
        return Driver(), None
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver does not list its GPUs ({error})"


class Driver:
    """NVML after nvmlInit(). Handles are looked up once, by UUID."""

    def __init__(self) -> None:
        self._handles: dict[str, object] = {}
        self._gpus = tuple(
            gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in self._devices(index)
        )

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus

    def driver(self) -> str | None:
        return _text(_maybe(pynvml.nvmlSystemGetDriverVersion))

    def sample(self, uuid: str) -> GpuSample:
        handle = self._handles[uuid]
        rates = _maybe(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power = _maybe(pynvml.nvmlDeviceGetPowerUsage, handle)
        memory = _maybe(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuSample(
            uuid=uuid,
            at_s=time.monotonic(),
            used_bytes=0 if memory is None else int(memory.used),
            utilization=None if rates is None else rates.gpu / 100.0,
            power_w=None if power is None else power / 1000.0,
            temperature_c=_maybe(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=_maybe(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            throttle=int(_maybe(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0),
        )

    def users(self, uuid: str) -> Sequence[User]:
        found = _maybe(pynvml.nvmlDeviceGetComputeRunningProcesses, self._handles[uuid]) or []
        return [User(uuid=uuid, pid=p.pid, memory_bytes=p.usedGpuMemory) for p in found]

    def _devices(self, index: int) -> list[Gpu]:
        """The device itself, or its MIG instances if it is split."""
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        mode = _maybe(pynvml.nvmlDeviceGetMigMode, device)
        if not mode or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return [self._describe(device, index)]
        count = _maybe(pynvml.nvmlDeviceGetMaxMigDeviceCount, device) or 0
        instances = (_maybe(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, i) for i in range(count))
        return [self._describe(each, index, mig=True) for each in instances if each is not None]

    def _describe(self, handle: object, index: int, *, mig: bool = False) -> Gpu:
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle)) or ""
        self._handles[uuid] = handle
        memory = _maybe(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return Gpu(
            uuid=uuid,
            name=_text(_maybe(pynvml.nvmlDeviceGetName, handle)) or "unknown GPU",
            memory_bytes=0 if memory is None else int(memory.total),
            shared_memory=memory is None,
            index=index,
            mig=mig,
        )


def _maybe(question: Callable[..., T], *arguments: object) -> T | None:
    """The answer, None if this device or driver does not know the question."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: object) -> str | None:
    if value is None:
        return None
    return value.decode() if isinstance(value, bytes) else str(value)
