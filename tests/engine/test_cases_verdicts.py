"""Public faults that are about verdicts, memory, caches and names; the numbers are those of docs/cases.md."""

import ast
import asyncio
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

import tuner
from tests.engine.expositions import EXPOSITIONS
from tests.engine.helpers import ending, leftovers, spec
from tuner.engine import boots, metrics
from tuner.engine.boots import about_first, boots_again, first_drifts, kv_drift
from tuner.engine.failures import NODE_FAULTS, classify, failed
from tuner.engine.gpu import Gpu, Gpus, GpuSample, User
from tuner.engine.server import CacheReset, Server, serve
from tuner.errors import Aborted, BadInput, Infeasible, StudyFailed, UnsupportedKnob
from tuner.knobs.arguments import compile_candidate, fixed
from tuner.knobs.discover import facts_of_version
from tuner.knobs.space import load
from tuner.processes import tagged
from tuner.profiles.export import render
from tuner.records import Candidate, LaunchSpec, Profile, ProfileKey

GIB = 1 << 30
WORDS: dict[str, str] = json.loads(Path(__file__).with_name("words.json").read_text())


async def served(launch: LaunchSpec, *, settle: bool) -> Server:
    async with serve(launch, settle=settle) as server:
        pass
    return server


def test_a_worker_that_died_of_a_signal_is_named() -> None:
    """Seen on vLLM 0.32's CPU build: the server itself ends with 0."""
    text = (
        "(EngineCore pid=7) ERROR 11-28 02:02:03 [multiproc_executor.py:315] "
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor.\n"
        "(EngineCore pid=7) ERROR 11-28 02:02:03 [core.py:1512] EngineCore encountered a fatal error.\n"
    )
    found = classify(text, 0, "startup")
    assert (found.kind, found.outcome) == ("engine_dead", "infeasible")
    ended = "VllmWorker-0 ended first, killed by signal 4: this processor lacks an instruction"
    ended += " that the build uses"
    assert found.reason == f"the engine died: {ended}"
    under_load = text + (
        "(EngineCore pid=7) ERROR 11-28 02:02:03 [core.py:1512] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 11-28 02:02:03 [core.py:1512]   File "shm.py", line 867, in read\n'
        '(EngineCore pid=7) ERROR 11-28 02:02:03 [core.py:1512]     raise RuntimeError("cancelled")\n'
        "(EngineCore pid=7) ERROR 11-28 02:02:03 [core.py:1512] RuntimeError: cancelled\n"
    )
    assert classify(under_load, 0, "run").reason == f"the engine died: {ended}"
    assert "cancelled" in classify(under_load.split("\n", 1)[1], 0, "run").reason, "nothing better is known"


def test_case_07_a_first_boot_with_less_kv_cache_is_booted_again(tmp_path: Path) -> None:
    launch = spec(tmp_path, f"compile_once={tmp_path}/compiled")
    server = asyncio.run(served(launch, settle=True))
    assert (server.first_kv_tokens, server.kv_tokens) == (3888, 4096)
    assert server.timeline["first_kv_drift"] == pytest.approx(-0.0508, abs=1e-4)
    assert (
        about_first([server.timeline]) == "1 discarded: the KV cache of the next boot differed by up to 5.1%"
    )
    assert not server.compiled_anew
    assert "Compiling a graph" in (tmp_path / "engine-first.log").read_text()
    assert leftovers(launch) == []


@pytest.mark.parametrize(
    ("timelines", "again", "said"),
    [
        ([], True, "none was discarded"),
        ([{"ready_s": 95.0}, {"first_ready_s": 95.0}], True, "none was discarded"),
        ([{"first_kv_drift": -0.0011}, {"ready_s": 50.0}], False,
         "1 discarded: the KV cache of the next boot differed by up to 0.1%"),
        ([{"first_kv_drift": -0.0508}], True,
         "1 discarded: the KV cache of the next boot differed by up to 5.1%"),
        ([{"first_kv_drift": -0.0011}, {"first_kv_drift": 0.02}], True,
         "2 discarded: the KV cache of the next boot differed by up to 2.0%"),
    ],
)  # fmt: skip
def test_case_07_first_boots_are_thrown_away_until_one_proved_harmless(
    timelines: list[dict[str, float]], again: bool, said: str
) -> None:
    """On an H100 the caches were 1,071,136 and 1,072,288 tokens, and the second boot took 95 s."""
    assert boots_again(first_drifts(timelines)) is again
    assert about_first(timelines) == said


def test_case_07_a_boot_without_compiling_is_not_repeated(tmp_path: Path) -> None:
    server = asyncio.run(served(spec(tmp_path), settle=True))
    assert server.first_kv_tokens is None


@pytest.mark.parametrize(
    ("now", "earlier", "drift"),
    [(4096, [3888], 0.053), (4096, [4096, 4080], None), (4096, [], None), (None, [4096], None)],
)
def test_case_07_a_kv_cache_of_another_size_is_flagged(
    now: int | None, earlier: list[int | None], drift: float | None
) -> None:
    assert kv_drift(now, earlier) == (pytest.approx(drift, abs=1e-3) if drift else None)


class Card:
    """A driver whose one card gives back memory as the script says: used GiB per look, the last one stays."""

    def __init__(self, used_gib: Sequence[float], pids: Sequence[int] = ()) -> None:
        self._used = list(used_gib)
        self._pids = pids
        self.looks = 0

    def gpus(self) -> Sequence[Gpu]:
        return [Gpu(uuid="GPU-1", name="card", memory_bytes=80 * GIB, index=0)]

    def sample(self, uuid: str) -> GpuSample:
        used = self._used[min(self.looks, len(self._used) - 1)]
        self.looks += 1
        return GpuSample(uuid=uuid, at_s=float(self.looks), used_bytes=int(used * GIB))

    def users(self, uuid: str) -> Sequence[User]:
        return [User(uuid=uuid, pid=pid, memory_bytes=None) for pid in self._pids]

    def driver(self) -> str | None:
        return "1"


def ticking() -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 1.0


def test_case_08_the_launch_waits_until_memory_is_back_for_three_looks() -> None:
    card = Card([0.5, 70.0, 70.0, 0.5, 70.0, 0.6, 0.5, 0.7])
    gpus = Gpus.open({}, nvml=card)
    asyncio.run(gpus.wait_free(interval_s=0))
    assert card.looks == 8


def test_case_08_memory_that_never_comes_back_stops_the_next_launch(tmp_path: Path) -> None:
    clock = ticking()
    gpus = Gpus.open({}, nvml=Card([0.5, 70.0]))
    with pytest.raises(Aborted, match=r"GPU-1: 69\.5 GiB more than at first") as caught:
        asyncio.run(gpus.wait_free(interval_s=0, timeout_s=20.0, clock=lambda: next(clock)))
    assert caught.value.cause == "gpu_dirty"
    assert caught.value.cause in NODE_FAULTS


@pytest.mark.parametrize("version", ["0.8.5.post2", "0.10.2.post2", "0.11.2", "0.32.0"])
@pytest.mark.parametrize("preemption", ["recompute", "swap:4", "offload:8"])
def test_case_12_preemption_is_compiled_for_the_version_or_refused(version: str, preemption: str) -> None:
    facts = facts_of_version(version)
    candidate = Candidate({"preemption": preemption})
    driven = version != "0.8.5.post2"
    offloads = preemption.startswith("offload") and version in ("0.11.2", "0.32.0")
    if driven and (preemption == "recompute" or offloads):
        argv = compile_candidate(candidate, facts).argv
        assert {part for part in argv if part.startswith("--")} <= facts.flags
    else:
        with pytest.raises(UnsupportedKnob, match="preemption"):
            compile_candidate(candidate, facts)
    if preemption.startswith("swap") and version == "0.10.2.post2":
        pinned = compile_candidate(candidate, facts, env={"VLLM_USE_V1": "0"})
        assert pinned.argv == ("--preemption-mode", "swap", "--swap-space", "4")


def test_case_12_a_fallback_to_the_old_engine_fails_the_trial(tmp_path: Path) -> None:
    error = asyncio.run(ending(spec(tmp_path, "v0")))
    assert isinstance(error, Infeasible)
    assert error.cause == "v0_fallback"
    assert leftovers(spec(tmp_path)) == []


@pytest.mark.parametrize(
    ("version", "flag", "there"),
    [("0.17.1", "swap-space", True), ("0.18.1", "swap-space", False),
     ("0.16.0", "disable-log-requests", True), ("0.17.1", "disable-log-requests", False)],
)  # fmt: skip
def test_case_13_a_flag_that_is_gone_is_refused_before_any_launch(
    version: str, flag: str, there: bool
) -> None:
    facts = facts_of_version(version)
    value: object = 4 if flag == "swap-space" else True
    if there:
        assert f"--{flag}" in fixed({flag: value}, facts)
    else:
        with pytest.raises(BadInput, match=flag):
            fixed({flag: value}, facts)


def test_case_13_an_unknown_knob_in_a_space_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("name: x\nknobs:\n  max_num_seq: [1, 2]\n")
    with pytest.raises(BadInput, match="max_num_seq"):
        load(path)


@pytest.mark.parametrize("version", EXPOSITIONS)
def test_case_14_five_ages_of_metrics_say_the_same(version: str) -> None:
    zero = metrics.parse("")
    said = metrics.parse(EXPOSITIONS[version])
    delta = metrics.between(zero, said)
    expected = {
        "running": 3.0, "waiting": 2.0, "kv_usage": 0.4, "preemptions": 7.0, "prompt_tokens": 1000.0,
        "generation_tokens": 200.0, "iterations": 50.0, "batch_tokens_mean": 24.0, "prefix_hit_rate": 0.6,
        "ttft_seconds_sum": 1.5, "itl_seconds_sum": 3.8, "itl_seconds_count": 190.0,
    }  # fmt: skip
    assert {name: delta[name] for name in expected} == expected
    assert delta["spec_drafted"] is None
    assert delta["e2e_seconds_sum"] is None
    assert said["swapped"] == (0.0 if version == "0.7" else None)


def resets(tmp_path: Path, fault: str) -> CacheReset:
    async def reset() -> CacheReset:
        async with serve(spec(tmp_path, fault)) as server:
            return await server.reset_cache(pause_s=0.0)

    return asyncio.run(reset())


@pytest.mark.parametrize(
    ("fault", "proved", "how"),
    [("reset_refused=2", True, "body"), ("reset_refused=-1", False, "refused"),
     ("reset_silent", False, "status")],
)  # fmt: skip
def test_case_15_a_cache_reset_is_believed_only_on_the_engines_word(
    tmp_path: Path, fault: str, proved: bool, how: str
) -> None:
    assert resets(tmp_path, fault) == CacheReset(proved=proved, how=how)


def test_case_16_a_poisoned_compile_cache_is_wiped_and_no_other(tmp_path: Path) -> None:
    ours = boots.cache_root(tmp_path, version="0.32.0", platform="cuda", gpu_name="H100", command=("a",))
    other = boots.cache_root(tmp_path, version="0.32.0", platform="cuda", gpu_name="A100", command=("a",))
    assert ours != other
    for path in (ours, other):
        (path / "torch_compile_cache").mkdir()
    launch = spec(tmp_path / "trial", "print=compile_cache", env=boots.cache_environment(ours))
    error = asyncio.run(ending(launch))
    assert isinstance(error, Aborted)
    assert error.cause == "compile_cache"
    assert not (ours / "torch_compile_cache").exists()
    assert (other / "torch_compile_cache").exists()


def test_case_16_two_launches_never_share_a_compile_cache(tmp_path: Path) -> None:
    home = boots.cache_root(tmp_path, version="0.32.0", platform="cpu", gpu_name=None, command=())
    env = boots.cache_environment(home)
    with boots.claimed_cache(env) as first, boots.claimed_cache(env) as second:
        assert first["VLLM_CACHE_ROOT"] == str(home)
        assert second["VLLM_CACHE_ROOT"] != first["VLLM_CACHE_ROOT"]
    with boots.claimed_cache(env) as again:
        assert again["VLLM_CACHE_ROOT"] == str(home)


def test_case_16_a_cache_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torch_compile_cache").mkdir()
    assert not boots.wipe_cache({"VLLM_CACHE_ROOT": str(tmp_path)})
    assert (tmp_path / "torch_compile_cache").exists()


def test_case_17_out_of_memory_in_the_sampler_warm_up_names_the_knob(tmp_path: Path) -> None:
    error = asyncio.run(ending(spec(tmp_path, "print=oom_warmup")))
    assert isinstance(error, Infeasible)
    assert error.cause == "oom_warmup"
    assert "max_num_seqs" in str(error)
    assert "1024" in str(error)
    assert error.violation.oom == 0.5


def test_case_21_sleep_mode_is_not_used_to_park_an_engine() -> None:
    """Sleeping leaks memory from day to day, so nothing here may rely on it: no code asks for it."""
    spoken = [
        (path, node.value)
        for path in Path(tuner.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [path for path, text in spoken if text.startswith(("/sleep", "/wake_up"))] == []


def test_case_23_strange_pids_decide_nothing_memory_does() -> None:
    """In a container the driver names pids of the host, or none."""
    ours_but_strange = Gpus.open({}, nvml=Card([0.5], pids=[4_000_000]))
    assert ours_but_strange.foreign_use() is None
    asyncio.run(ours_but_strange.wait_free(interval_s=0))
    unnamed = Gpus.open({}, nvml=Card([30.0]))
    assert unnamed.foreign_use() == "GPU-1: 30.0 GiB in use (pids: not told)"


def test_case_24_a_gauge_once_per_api_server_is_not_added_up() -> None:
    lines = [f'vllm:kv_cache_usage_perc{{engine="0",pid="{pid}"}} {pid / 100}' for pid in range(10, 18)]
    running = [f'vllm:num_requests_running{{engine="{e}",pid="{p}"}} {4 + e}' for e in (0, 1) for p in (1, 2)]
    text = "\n".join(
        [
            "# TYPE vllm:kv_cache_usage_perc gauge",
            *lines,
            "# TYPE vllm:num_requests_running gauge",
            *running,
            "",
        ]
    )
    said = metrics.parse(text)
    assert said["kv_usage"] == 0.17
    assert said["running"] == 9.0


def test_case_25_an_exported_file_survives_the_engines_own_reader() -> None:
    profile = Profile(
        id=1, key=ProfileKey(model="m", target="t", workload="w"), version=1,
        candidate=Candidate({"enable_prefix_caching": False, "max_num_seqs": 64}), engine_version="0.32.0",
        gpu_class="g", study_id="s", trial_id=1, argv=("--no-enable-prefix-caching", "--max-num-seqs", "64"),
        env={}, evidence={}, digest="d", created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    text = render(profile, "vllm-yaml")
    read = yaml.safe_load(text)
    assert read == {"no-enable-prefix-caching": True, "max-num-seqs": 64}
    assert not any("_" in key or value in (None, False) for key, value in read.items())


@pytest.mark.parametrize("kind", sorted(WORDS))
def test_each_known_error_gets_its_verdict_first_cause_first(tmp_path: Path, kind: str) -> None:
    """Wrapped as the engine wraps it, and followed by another error that it caused."""
    expected = kind.removesuffix("_old")
    follow_up = "engine_dead" if kind != "engine_dead" else "engine_dead+engine_dead"
    error = asyncio.run(ending(spec(tmp_path, f"print={kind}+{follow_up}", asked={"max_num_seqs": 8})))
    assert error.cause == expected
    assert type(error) is type(failed(expected).error())
    assert error.evidence


@pytest.mark.parametrize(
    ("kind", "kv", "oom"),
    [("max_len_gt_kv", 0.75, None), ("max_len_gt_kv_old", 0.75, None), ("no_kv_memory", 1.0, None),
     ("oom", None, 0.05), ("oom_old", None, 2.01 / 23.59)],
)  # fmt: skip
def test_a_violation_is_graded_by_the_numbers_in_the_log(
    kind: str, kv: float | None, oom: float | None
) -> None:
    violation = classify(WORDS[kind], 1, "startup").violation
    assert violation.kv == pytest.approx(kv)
    assert violation.oom == pytest.approx(oom)


@pytest.mark.parametrize(
    ("line", "held_gib", "kind", "oom"),
    [("(78.4/79.18 GiB) on startup is less than desired GPU memory utilization (0.999, 79.1 GiB)", 0.0, "oom",
      0.7 / 79.18),
     ("(73.0/79.18 GiB) on startup is less than desired GPU memory utilization (0.95, 75.22 GiB)", 5.0, "oom",
      2.22 / 79.18),
     ("(73.0/79.18 GiB) on startup is less than desired GPU memory utilization (0.95, 75.22 GiB)", 0.4,
      "gpu_busy", None)],
)  # fmt: skip
def test_who_wants_more_than_a_free_card_has_is_at_fault(
    line: str, held_gib: float, kind: str, oom: float | None
) -> None:
    """Seen on an H100 with --gpu-memory-utilization 0.999; nobody else was on the card."""
    text = f"(EngineCore pid=7) ERROR ValueError: Free memory on device cuda:0 {line}. Decrease it.\n"
    found = classify(text, 1, "startup", held_gib=held_gib)
    assert (found.kind, found.outcome) == (kind, "aborted" if oom is None else "infeasible")
    assert found.violation.oom == (None if oom is None else pytest.approx(max(0.01, oom), rel=1e-6))


@pytest.mark.parametrize(
    ("argv", "asked", "wanted"),
    [(("--max-num-seqs", "many"), {"max_num_seqs": "many"}, Infeasible),
     (("--max-num-seqs", "many"), {}, StudyFailed), (("--no-such", "1"), {"max_num_seqs": 8}, StudyFailed)],
)  # fmt: skip
def test_a_refusal_is_the_candidates_fault_only_for_its_own_knobs(
    tmp_path: Path, argv: tuple[str, ...], asked: dict[str, str | int], wanted: type[Exception]
) -> None:
    error = asyncio.run(ending(spec(tmp_path, argv=argv, asked=dict(asked))))
    assert type(error) is wanted
    assert argv[0] in str(error)
    assert tagged(None) is not None


def test_kill_by_the_kernel_is_told_from_a_kill_by_hand() -> None:
    assert classify("", -9, "run", oom_killed=True).kind == "host_oom"
    assert classify("", -9, "run").kind == "killed"
    assert classify(WORDS["engine_dead"], 0, "run", oom_killed=True).kind == "host_oom"
    assert classify(WORDS["oom"], -9, "run", oom_killed=True).kind == "oom"


def test_a_slow_compile_is_no_hang_when_the_engine_dies_of_something_else() -> None:
    slow = "INFO [shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds."
    assert classify(f"{slow}\n{WORDS['engine_dead']}", 1, "run").kind == "engine_dead"
    assert classify(slow, 1, "run").kind == "crashed"
    assert classify(slow, None, "run").kind == "hang"
