"""Processes: nothing of a launch outlives it, whatever it does and however we end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tuner import processes
from tuner.errors import BadInput
from tuner.leftovers import LOG_LIMIT, cgroup_home, cgroup_members, private_directory
from tuner.processes import HOST, Process, reap, run, spawn, stop, tagged

PATIENCE_S = 600.0
ROOT = str(Path(processes.__file__).parents[1])


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def launch(tmp_path: Path, code: str, **more: object) -> Process:
    return spawn(
        python(code),
        env={"PYTHONUNBUFFERED": "1"},
        directory=tmp_path,
        log=tmp_path / "log",
        tag=uuid.uuid4().hex,
        **more,  # type: ignore[arg-type]
    )


def wait_for(condition: Callable[[], object]) -> None:
    """Poll until it holds; the watchdog is generous because the machine may be busy."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_run_answers_with_code_and_both_streams() -> None:
    done = run(
        python("import sys; print(sys.stdin.read()); print('e', file=sys.stderr); sys.exit(3)"),
        timeout_s=PATIENCE_S, stdin="hello",
    )  # fmt: skip
    assert (done.code, done.out, done.err) == (3, "hello\n", "e\n")


def test_run_kills_the_whole_session_at_its_deadline(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; sleep 600"
    done = run(["sh", "-c", script], timeout_s=0.5)
    assert done.code is None
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"/no/such/program"):
        run(["/no/such/program"], timeout_s=1)
    tag = uuid.uuid4().hex
    with pytest.raises(BadInput, match=r"/no/such/program"):
        spawn(["/no/such/program"], env={}, directory=tmp_path, log=tmp_path / "log", tag=tag)
    assert not private_directory(tag).exists()


def test_the_environment_is_laid_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_TEST_GONE", "1")
    code = "import os; print(os.environ.get('TUNER_TEST_GONE'), os.environ['TUNER_TEST_SET'])"
    done = run(python(code), timeout_s=PATIENCE_S, env={"TUNER_TEST_GONE": None, "TUNER_TEST_SET": "x"})
    assert done.out == "None x\n"


def test_a_child_that_left_the_group_is_found_by_its_tag_and_stopped(tmp_path: Path) -> None:
    code = (
        "import subprocess,time; subprocess.Popen(['sleep','600'], start_new_session=True); time.sleep(600)"
    )
    process = launch(tmp_path, code)
    wait_for(lambda: len(tagged(process.tag)) == 2)
    assert {p.pid for p in tagged()} >= {p.pid for p in tagged(process.tag)}
    stopped = asyncio.run(stop(process, timeout_s=10))
    assert (stopped.how, stopped.survivors) == ("terminated", ())
    assert tagged(process.tag) == []
    assert not private_directory(process.tag).exists()


def test_who_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    process = launch(tmp_path, code)
    wait_for(lambda: "deaf" in (tmp_path / "log").read_text() if (tmp_path / "log").exists() else False)
    stopped = asyncio.run(stop(process, timeout_s=0.4))
    assert (stopped.how, stopped.code) == ("killed", -signal.SIGKILL)
    assert tagged(process.tag) == []


def test_an_end_before_we_asked_is_told_from_one_after(tmp_path: Path) -> None:
    process = launch(tmp_path, "raise SystemExit(7)")
    wait_for(lambda: process.code is not None)
    stopped = asyncio.run(stop(process, timeout_s=10))
    assert (stopped.how, stopped.code, process.ended_unasked) == ("exited", 7, True)


def test_a_zombie_counts_as_gone(tmp_path: Path) -> None:
    process = launch(tmp_path, "pass")
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert HOST.members(process) == []
    asyncio.run(stop(process, timeout_s=10))


def test_orphans_of_a_launch_are_waited_for(tmp_path: Path) -> None:
    process = launch(tmp_path, "import subprocess,time; subprocess.Popen(['sleep','600']); time.sleep(600)")
    wait_for(lambda: len(tagged(process.tag)) == 2)
    members = HOST.members(process)
    os.kill(process.pid, signal.SIGKILL)
    asyncio.run(stop(process, timeout_s=10))
    assert not any(psutil.pid_exists(pid) for pid in members)


def test_the_log_is_bounded_redacted_and_always_drained(tmp_path: Path) -> None:
    code = f"print('password'); [print('x' * 999) for _ in range({LOG_LIMIT // 1000 + 2000})]; print('end')"
    process = launch(tmp_path, code, redact=lambda line: line.replace(b"password", b"[redacted]"))
    wait_for(lambda: process.code is not None)
    asyncio.run(stop(process, timeout_s=10))
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(b"[redacted]\n")
    assert text.endswith(b"end\n")
    assert b"bytes left out" in text
    assert len(text) < LOG_LIMIT


def test_a_full_disk_does_not_block_the_writer(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    process = launch(tmp_path, "[print('x' * 999) for _ in range(2000)]")
    wait_for(lambda: process.code is not None)
    asyncio.run(stop(process, timeout_s=10))
    assert process.code == 0
    assert process.log_lost is not None


def test_of_an_overlong_line_the_rest_is_left_out(tmp_path: Path) -> None:
    process = launch(tmp_path, "print('x' * 300000 + 'tail'); print('next')")
    wait_for(lambda: process.code is not None)
    asyncio.run(stop(process, timeout_s=10))
    text = (tmp_path / "log").read_text()
    assert "tail" not in text
    assert text.endswith("next\n")
    assert len(text) < 100_000


def test_shared_memory_that_it_had_mapped_goes_with_it(tmp_path: Path) -> None:
    name = f"tuner_test_{uuid.uuid4().hex}"
    code = (
        f"import mmap,time; f=open('/dev/shm/{name}','w+b'); f.truncate(4096); m=mmap.mmap(f.fileno(),4096);"
        "f.close(); print('mapped'); time.sleep(600)"
    )
    process = launch(tmp_path, code)
    wait_for(lambda: (tmp_path / "log").exists() and "mapped" in (tmp_path / "log").read_text())
    asyncio.run(stop(process, timeout_s=10))
    assert not Path("/dev/shm", name).exists()


SHARING = """
import multiprocessing.shared_memory, multiprocessing as m, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if __name__ == "__main__":
    kept = [multiprocessing.shared_memory.SharedMemory(create=True, size=4096) for _ in range(2)]
    lock = m.get_context("spawn").Lock()
    print(*(block.name for block in kept), lock._semlock.name.lstrip("/"), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["stop", "reap"])
def test_shared_memory_and_semaphores_of_a_killed_python_go_with_it(tmp_path: Path, how: str) -> None:
    process = launch(tmp_path, SHARING)
    wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().endswith("\n"))
    first, second, semaphore = (tmp_path / "log").read_text().split()
    files = [Path("/dev/shm", name) for name in (first, second, f"sem.{semaphore}")]
    assert all(path.exists() for path in files)
    if how == "reap":
        assert reap(process.tag) == 2
    asyncio.run(stop(process, timeout_s=0.2))
    assert not any(path.exists() for path in files)


def test_it_has_a_control_group_of_its_own_where_the_host_allows_it(tmp_path: Path) -> None:
    if cgroup_home() is None:
        pytest.skip("this host lets us make no control group")
    process = launch(tmp_path, "import time; time.sleep(600)")
    group = process.cgroup
    assert group is not None
    assert str(process.pid) in (group / "cgroup.procs").read_text().split()
    asyncio.run(stop(process, timeout_s=10))
    assert not group.exists()


def test_a_control_group_reaches_who_hides_from_tag_and_group(tmp_path: Path) -> None:
    if cgroup_home() is None:
        pytest.skip("this host lets us make no control group")
    hiding = ["setsid", "env", "-i", sys.executable, "-c", "import time; time.sleep(600)"]
    process = launch(tmp_path, f"import subprocess,time; subprocess.Popen({hiding!r}); time.sleep(600)")
    assert process.cgroup is not None
    wait_for(lambda: len(cgroup_members(process.tag)) > len(tagged(process.tag)) > 0)
    asyncio.run(stop(process, timeout_s=10))
    assert cgroup_members(process.tag) == []


def test_it_keeps_to_its_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    process = launch(tmp_path, "import time; time.sleep(600)", cores=(core,))
    assert psutil.Process(process.pid).cpu_affinity() == [core]
    asyncio.run(stop(process, timeout_s=10))


CONTROLLER = """
import sys, time
from tuner import processes
code = "import subprocess,time; subprocess.Popen(['sleep','600'], start_new_session=True); time.sleep(600)"
tag, folder = sys.argv[1:3]
processes.spawn(
    [sys.executable, "-c", code], env={}, directory=folder, log=folder + "/log", tag=tag,
    stop_command=("sh", "-c", "echo {tag} >> " + folder + "/asked"),
)
if len(sys.argv) > 3:
    import os, signal
    os.kill(processes._guardian._popen.pid, signal.SIGKILL)
    processes._guardian._popen.wait()
if len(sys.argv) > 4:
    processes.spawn(["true"], env={}, directory=folder, log=folder + "/more", tag="short" + tag)
    processes._guardian.forget("short" + tag)
print("up", flush=True)
time.sleep(600)
"""


def controller(tmp_path: Path, *more: str) -> tuple["subprocess.Popen[bytes]", str]:
    """A controller in a process of its own, with one launch running."""
    tag = uuid.uuid4().hex
    popen = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, tag, str(tmp_path), *more],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
    )
    assert popen.stdout is not None
    with popen.stdout:
        assert popen.stdout.readline() == b"up\n"
    wait_for(lambda: len(tagged(tag)) == 2)
    return popen, tag


def test_a_killed_controller_leaves_nothing(tmp_path: Path) -> None:
    popen, tag = controller(tmp_path)
    popen.kill()
    popen.wait()
    wait_for(lambda: not tagged(tag) and not private_directory(tag).exists())
    assert (tmp_path / "asked").read_text() == f"{tag}\n"


def test_a_guardian_that_died_is_replaced_and_told_of_all_that_is_open(tmp_path: Path) -> None:
    popen, tag = controller(tmp_path, "without guardian", "another launch")
    popen.kill()
    popen.wait()
    wait_for(lambda: not tagged(tag) and not private_directory(tag).exists())
    assert (tmp_path / "asked").read_text() == f"{tag}\n"


@pytest.mark.parametrize("stop_command", ["/no/such/stop", "false"])
def test_a_stop_command_that_does_nothing_keeps_nothing_alive(tmp_path: Path, stop_command: str) -> None:
    process = launch(tmp_path, "import time; time.sleep(600)", stop_command=(stop_command,))
    assert asyncio.run(stop(process, timeout_s=10)).survivors == ()
    assert tagged(process.tag) == []


def test_what_a_killed_controller_and_guardian_leave_is_reaped_by_tag(tmp_path: Path) -> None:
    popen, tag = controller(tmp_path, "without guardian")
    popen.kill()
    popen.wait()
    assert len(tagged(tag)) == 2
    assert reap(tag) == 2
    assert tagged(tag) == []
    assert not private_directory(tag).exists()
    assert reap(tag) == 0


def test_a_stop_command_reaches_what_hides_from_tag_and_group(tmp_path: Path) -> None:
    """A container: its processes have an environment and a session of their own, and a way in by name."""
    inside = f"import os,time; open('{tmp_path}/inside','w').write(str(os.getpid())); time.sleep(600)"
    prefix = ["unshare", "--pid", "--fork", "setsid", "env", "-i"]
    if run([*prefix, "true"], timeout_s=PATIENCE_S).code != 0:
        pytest.skip("this host lets us make no PID namespace")
    tag = uuid.uuid4().hex
    kill = ("sh", "-c", f"echo {{tag}} > {tmp_path}/asked; kill -9 $(cat {tmp_path}/inner)")
    process = spawn(
        [*prefix, *python(inside)], env={}, directory=tmp_path, log=tmp_path / "log", tag=tag,
        stop_command=kill,
    )  # fmt: skip
    process.cgroup = None  # a container is in a control group of its runtime
    hidden = f"pgrep -f {tmp_path}/inside | grep -v $$"
    wait_for(lambda: (tmp_path / "inside").exists())
    found = [int(pid) for pid in run(["sh", "-c", hidden], timeout_s=PATIENCE_S).out.split()]
    inner = max(pid for pid in found if psutil.pid_exists(pid))
    (tmp_path / "inner").write_text(str(inner))
    assert inner not in HOST.members(process)
    asyncio.run(stop(process, timeout_s=10))
    assert (tmp_path / "asked").read_text().strip() == tag
    wait_for(lambda: not psutil.pid_exists(inner))
