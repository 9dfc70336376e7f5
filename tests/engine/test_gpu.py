"""GPUs through a driver that is a program with known truth; without any, the same interface says so."""

import asyncio
from collections.abc import Sequence

import pytest

from tuner.engine.gpu import Gpu, Gpus, GpuSample, User, Watch, select, summarize, throttled, visible_devices
from tuner.errors import Aborted

GIB = 1 << 30
CARDS = tuple(
    Gpu(uuid=f"GPU-{letter}1", name="H100", memory_bytes=80 * GIB, index=index)
    for index, letter in enumerate("abcd")
)
MIG = tuple(
    Gpu(uuid=f"MIG-{letter}1", name="H100 MIG 1g", memory_bytes=10 * GIB, index=0, mig=True)
    for letter in "xy"
)


class Driver:
    """Cards that each hold `used` bytes, and how often they were looked at."""

    def __init__(self, cards: Sequence[Gpu] = CARDS, used: int = 0) -> None:
        self.cards, self.used, self.looks = cards, used, 0

    def gpus(self) -> Sequence[Gpu]:
        return self.cards

    def sample(self, uuid: str) -> GpuSample:
        self.looks += 1
        return GpuSample(uuid=uuid, at_s=float(self.looks), used_bytes=self.used)

    def users(self, uuid: str) -> Sequence[User]:
        return []

    def driver(self) -> str | None:
        return "580.1"


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, "abcd"), ("2,0", "ca"), ("GPU-b1", "b"), ("GPU-c,GPU-a1", "ca"), ("", ""), ("-1", ""),
        ("1,9,2", "b"), ("GPU-zz,0", ""), (" 3 , 0", "da"), ("0,GPU-b1", "a"), ("GPU-b1,0", "b"), ("0,0", ""),
        ("GPU-a1,GPU-a", ""), ("GPU-", ""), ("0,", "a"), ("0,-1,1", "a"), ("²", ""),
    ],
)  # fmt: skip
def test_visible_devices_are_chosen_as_cuda_does(visible: str | None, chosen: str) -> None:
    assert [gpu.uuid[4] for gpu in select(CARDS, visible)] == list(chosen)


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, ["GPU-w1"]), ("MIG-y", ["MIG-y1"]), ("MIG-y1,MIG-x1", ["MIG-y1"]), ("0", ["MIG-x1"]),
        ("1", ["GPU-w1"]), ("2", []),
    ],
)  # fmt: skip
def test_of_mig_instances_a_process_sees_one_and_cards_keep_their_place(
    visible: str | None, chosen: list[str]
) -> None:
    """The first card is split in two, the second is whole: its place is 1, not 2."""
    whole = Gpu(uuid="GPU-w1", name="H100", memory_bytes=80 * GIB, index=1)
    assert [gpu.uuid for gpu in select((*MIG, whole), visible)] == chosen


def test_where_all_cards_are_split_the_first_instance_is_used() -> None:
    assert [gpu.uuid for gpu in select(MIG, None)] == ["MIG-x1"]


def test_mig_instances_go_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus.open({"CUDA_VISIBLE_DEVICES": "MIG-x"}, nvml=Driver(MIG))
    assert gpus.uuids == ("MIG-x1",)
    assert visible_devices(("MIG-x1",), gpus) == {"CUDA_VISIBLE_DEVICES": "MIG-x1"}
    alone = Gpus.open({}, nvml=Driver(MIG[:1]))
    assert visible_devices(alone.uuids, alone) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_devices(alone.uuids, alone) == {"CUDA_VISIBLE_DEVICES": "MIG-x1"}


def test_what_a_study_chooses_is_counted_in_pci_order() -> None:
    gpus = Gpus.open({"CUDA_VISIBLE_DEVICES": "2"}, nvml=Driver())
    chosen = visible_devices(gpus.uuids, gpus, {"CUDA_VISIBLE_DEVICES": "2"})
    assert chosen == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_node_s_own_cards_are_looked_after_and_no_others() -> None:
    assert Gpus.open({}, only=("GPU-d1", "GPU-b1"), nvml=Driver()).uuids == ("GPU-b1", "GPU-d1")
    gone = Gpus.open({}, only=("GPU-e1",), nvml=Driver())
    assert gone.absent == "no GPU is visible (CUDA_VISIBLE_DEVICES=None, none of GPU-e1)"


def test_an_engine_is_shown_its_devices_by_their_place_in_pci_order() -> None:
    gpus = Gpus.open({}, nvml=Driver())
    expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,0"}
    assert visible_devices(("GPU-c1", "GPU-a1"), gpus) == expected
    assert visible_devices(("GPU-c1",), None) == {"CUDA_VISIBLE_DEVICES": "GPU-c1"}
    assert visible_devices((), gpus) == {}


def test_a_host_without_gpus_says_so_and_waits_for_nothing() -> None:
    gpus = Gpus(nvml=None, absent="no NVIDIA driver on this host")
    assert (gpus.uuids, gpus.sample(), gpus.users(), gpus.foreign_use()) == ((), (), (), None)
    asyncio.run(gpus.wait_free())
    with Watch(gpus) as watch:
        pass
    assert watch.summary() == {}


def test_hidden_devices_are_no_devices() -> None:
    gpus = Gpus.open({"CUDA_VISIBLE_DEVICES": ""}, nvml=Driver())
    assert gpus.absent == "no GPU is visible (CUDA_VISIBLE_DEVICES='')"


def test_memory_held_before_anything_of_ours_ran_is_refused() -> None:
    Gpus.open({}, nvml=Driver(used=GIB // 2)).refuse_foreign()
    with pytest.raises(Aborted, match=r"GPU-a1: 30\.0 GiB held") as caught:
        Gpus.open({}, nvml=Driver(used=30 * GIB)).refuse_foreign()
    assert caught.value.cause == "foreign_use"


def test_memory_shared_with_the_host_decides_nothing() -> None:
    unified = (Gpu(uuid="GPU-u", name="GB10", memory_bytes=0, shared_memory=True),)
    gpus = Gpus.open({}, nvml=Driver(unified, used=100 * GIB))
    gpus.refuse_foreign()
    assert gpus.foreign_use() is None
    asyncio.run(gpus.wait_free({"GPU-u": 0}, interval_s=0))


def test_a_watch_samples_every_device_at_least_once() -> None:
    with Watch(Gpus.open({}, nvml=Driver(used=2 * GIB)), interval_s=60.0) as watch:
        pass
    assert {s.uuid for s in watch.samples} == {gpu.uuid for gpu in CARDS}
    assert watch.summary()["gpu_memory_gib"] == 8.0


def test_samples_are_folded_into_measurement_names() -> None:
    samples = [
        GpuSample(
            uuid="a", at_s=float(second), used_bytes=second * GIB, utilization=0.5, power_w=300.0,
            temperature_c=60.0 + second, sm_clock_mhz=1980.0 - second, throttle=0x40 if second == 9 else 0x1,
        )
        for second in range(10)
    ]  # fmt: skip
    found = summarize(samples)
    assert found["gpu_memory_gib"] == 9.0
    assert found["gpu_utilization"] == 0.5
    assert found["gpu_energy_j"] == 2700.0
    assert found["gpu_temperature_max_c"] == 69.0
    assert found["gpu_clock_min_mhz"] == 1971.0
    assert found["gpu_throttled"] == 0.1
    assert found["gpu_throttle_reasons"] == 0x41
    assert found["gpu_power_mean_w"] == 300.0
    assert throttled(found)
    assert not throttled({"gpu_throttled": 0.01})
