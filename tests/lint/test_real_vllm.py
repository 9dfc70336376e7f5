"""What lint says of idle flags against the real vLLM (CPU build): the configuration that it makes of a line
with the flag and without it, and engines that were booted.
"""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.tiny import ENV, write
from tests.engine.real import INTERPRETER, real
from tests.lint.test_lint import COMMANDS
from tests.tuning.studies import WATCHDOG_S
from tuner.engine.server import serve
from tuner.knobs.discover import facts_of_version
from tuner.lint import flags, subject
from tuner.lint.flags import IDLE, WrittenFlag
from tuner.records import Value

VERSION = "0.32.0"
FACTS = facts_of_version(VERSION, "cpu")
SILENT = ("flag-no-effect", "flag-ignored", "flag-default")
"""Findings that say that the engine runs as it would without the flag."""
_ELSEWHERE = re.compile(
    r"--("
    r"model|tokenizer|served-model-name|host|port|uds|api-key|chat-template|hf-|revision"
    r"|speculative|spec-|config|load|mm-|limit-mm|language-model|skip-mm|media|quantization"
    r"|kv-transfer|kv-events|kv-cache-dtype|download|tool|enable-auto-tool|reasoning|default-chat"
    r"|distributed-executor|model-loader|runner|convert|pooler|structured|logits|override"
    r"|generation|max-model-len|enable-expert|all2all|eplb|enable-eplb|mamba|gdn|attention|moe"
    r"|middleware|allowed|lora-modules|nnodes|node-rank|master|headless|interleave|video|io-proc"
    r"|data-parallel|tensor-|pipeline-|compilation|kernel|device|trust|profiler|ec-|weight|worker"
    r"|uvicorn|ssl|log|otlp|numa|cpu-offload|decode-context|prefill-context|enable-dbo|dtype"
    r"|gpu-memory|num-gpu|kv-cache-mem|no-enable-auto|linear|optimization|performance"
    r"|enable-sleep|use-|scheduler-cls"
    r")"
)
"""Flags of files, hubs, cards and other hosts, which a tiny model on this CPU does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """« `flag` changes nothing » of one command line."""

    line: str
    id: str
    flag: str


def written(line: str) -> list[WrittenFlag]:
    """The flags of a command line that 0.32 takes and that a tiny model on a CPU can be given."""
    (engine,) = subject.engines(f"vllm serve {line}")
    given, _ = flags._given(engine.source, [])
    return [each for each in given if each.flag in FACTS.flags and flags._value(each, FACTS) is None]


def claims() -> Iterator[Claim]:
    """Everything that lint calls idle in the public command lines, and in one line a rule."""
    lines = [words for _, words in COMMANDS]
    ruled = [rule for rule in IDLE if rule.flag in VALUES]
    lines += [" ".join(("m", rule.flag, *VALUES[rule.flag], *rule.when)) for rule in ruled]
    for line in lines:
        (engine,) = subject.engines(f"vllm serve {line}")
        _, findings = flags.check(engine.source, FACTS, [])
        for each in findings:
            if each.id in SILENT:
                yield Claim(line=line, id=each.id, flag=each.flag)


VALUES = {
    "--disable-cascade-attn": (),
    "--cudagraph-capture-sizes": ("1", "2", "4"),
    "--max-cudagraph-capture-size": ("64",),
    "--prefix-caching-hash-algo": ("sha256_cbor",),
    "--kv-offloading-backend": ("lmcache",),
    "--max-loras": ("4",),
    "--max-lora-rank": ("32",),
    "--max-cpu-loras": ("8",),
    "--fully-sharded-loras": (),
    "--dbo-decode-token-threshold": ("64",),
    "--prefill-schedule-interval": ("4",),
    "--long-prefill-token-threshold-adaptive": (),
}


def words(line: str, model: str, without: str = "") -> list[str]:
    """The arguments that are resolved, without the one that is said to be idle."""
    argv = ["--model", model, "--skip-tokenizer-init"]
    for each in written(line):
        if each.flag != without and not _ELSEWHERE.match(each.flag):
            argv += [each.flag, *each.values]
    return argv


def resolve(questions: Mapping[str, Sequence[str]]) -> dict[str, object]:
    if not INTERPRETER or not Path(INTERPRETER).exists():
        pytest.fail("TUNER_TEST_VLLM names no interpreter that has vLLM: run make test-vllm")
    done = subprocess.run(
        [INTERPRETER, str(Path(__file__).parent / "resolve.py")],
        input=json.dumps(questions), capture_output=True, text=True, timeout=WATCHDOG_S, check=False,
        env={**os.environ, **ENV, "VLLM_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def with_flag(claim: Claim, model: str) -> list[str]:
    argv = words(claim.line, model, claim.flag)
    for each in written(claim.line):
        if each.flag == claim.flag:
            argv += [each.flag, *each.values]
    return argv


@pytest.mark.vllm
def test_no_flag_is_called_idle_that_changes_the_configuration(tmp_path: Path) -> None:
    model = write(tmp_path / "model", max_position_embeddings=32768)
    listed = list(dict.fromkeys(claims()))
    questions = {}
    for number, claim in enumerate(listed):
        questions[f"{number} with"] = with_flag(claim, model)
        questions[f"{number} without"] = words(claim.line, model, claim.flag)
    told = resolve(questions)
    false, open_ = [], []
    for number, claim in enumerate(listed):
        one, other = told[f"{number} with"], told[f"{number} without"]
        if isinstance(one, dict) or isinstance(other, dict):
            open_.append((claim, one if isinstance(one, dict) else other))
        elif _plain(one, claim.flag) != _plain(other, claim.flag):
            false.append((claim, _difference(one, other)))
    print(f"{len(listed)} claims, {len(open_)} that vLLM does not resolve here, {len(false)} false")
    assert len(listed) >= 40
    assert false == []
    assert len(open_) <= len(listed) // 5, open_


def _plain(text: object, flag: str) -> str:
    """A configuration without addresses, and without the record of the idle flag itself."""
    name = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    return re.sub(rf"0x[0-9a-f]+|\b{name}=[^,)]*|'{name}': [^,}}]*", "", str(text))


def _difference(one: object, other: object) -> list[str]:
    a, b = str(one).splitlines(), str(other).splitlines()
    return [f"{x[:300]} | {y[:300]}" for x, y in zip(a, b, strict=False) if x != y]


BOOTED = 30


def bare(line: str) -> list[str]:
    """The arguments of a line that a tiny model on a CPU can be given."""
    kept = [each for each in written(line) if not _ELSEWHERE.match(each.flag)]
    return [word for each in kept for word in (each.flag, *each.values)]


def bootable() -> list[str]:
    """Public command lines with at least one flag left that a tiny model on a CPU can be given."""
    seen: dict[tuple[str, ...], str] = {}
    for _, line in COMMANDS:
        if kept := tuple(bare(line)):
            seen.setdefault(kept, line)
    return list(seen.values())


@pytest.mark.vllm_full
@pytest.mark.parametrize("number", range(BOOTED))
def test_a_public_command_line_boots_and_idle_flags_are_idle(tmp_path: Path, number: int) -> None:
    """The engine runs with its default wherever lint says that the flag changes nothing."""
    line = bootable()[number % len(bootable())]
    argv = bare(line)
    (engine,) = subject.engines(f"vllm serve {line}")
    _, findings = flags.check(engine.source, FACTS, [])
    effective = asyncio.run(_effective(tmp_path, argv))
    for each in findings:
        if each.id == "flag-default" and each.flag in argv:
            name = each.flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
            if name in effective:
                assert effective[name] == FACTS.defaults[name], each


async def _effective(directory: Path, argv: Sequence[str]) -> Mapping[str, Value]:
    """What an engine that was booted with these arguments says that it runs with."""
    async with serve(real(directory, *argv)) as server:
        return dict(server.effective)
