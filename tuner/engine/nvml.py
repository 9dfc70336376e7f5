"""The NVIDIA driver behind tuner.engine.gpu, MIG instances included."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pynvml

from tuner.engine.gpu import Gpu, Sample, User

T = TypeVar("T")


def open_driver() -> tuple["Driver | None", str | None]:
    """The driver of this host, or None and one sentence that says why there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA driver on this host ({error})"
    try:
        return Driver(), None
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver does not tell of its GPUs ({error})"


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

    def sample(self, uuid: str) -> Sample:
        handle = self._handles[uuid]
        rates = _maybe(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power = _maybe(pynvml.nvmlDeviceGetPowerUsage, handle)
        memory = _maybe(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return Sample(
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
        """The device itself, or its MIG instances where it is split."""
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
    """The answer, None where this device or driver does not know the question."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: object) -> str | None:
    if value is None:
        return None
    return value.decode() if isinstance(value, bytes) else str(value)
