"""What lint says of flags against the real vLLM (CPU build): its parser, the configuration that it makes of a
line with a flag and without it, engines that were booted, and a running server.
"""

import json
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.tiny import ENV, write
from tests.engine.real import INTERPRETER
from tests.lint.test_lint import COMMANDS
from tests.lint.test_planted import TABLE
from tests.tuning.studies import WATCHDOG_S
from tests.vllm import ENGINE_BLOCK, Shared
from tuner.knobs.discover import facts_of_version
from tuner.lint import flags, run, subject
from tuner.lint.flags import IDLE, WrittenFlag

VERSION = "0.32.0"
FACTS = facts_of_version(VERSION, "cpu")
FACTS_CUDA = facts_of_version(VERSION, "cuda")
SILENT = ("flag-no-effect", "flag-ignored", "flag-default")
"""Findings that say that the engine runs as it would without the flag."""
REFUSED = ("flag-unknown", "flag-removed", "flag-too-new", "flag-renamed", "flag-value")
"""Findings that say that the engine does not start."""
_ELSEWHERE = re.compile(
    r"--("
    r"model|tokenizer|chat-template|revision|hf-|config-format|load-format|dtype|max-model-len"
    r"|mm-|limit-mm|language-model|skip-mm|media|allowed-local|video|speculative|spec-"
    r"|reasoning|quantization|kv-cache-dtype|kv-transfer|kv-events|distributed-executor|device|runner|convert|pooler"
    r"|task|generation|enable-expert|all2all|eplb|enable-eplb|enable-dbo|attention|moe|lora-modules|middleware"
    r"|nnodes|node-rank|master|headless|data-parallel|tensor-|pipeline-|decode-context|prefill-context"
    r"|block-size|compilation|cpu-offload|uds|ssl|weight|worker|logits"
    r")"
)
"""Flags of files, hubs, cards and other hosts, which a tiny text model on this CPU does not have."""


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


def words(line: str, model: str, without: Collection[str] = ()) -> list[str]:
    """What a tiny model on a CPU can be given of a line, without the flags that are said to be idle."""
    argv = ["--model", model, "--skip-tokenizer-init"]
    for each in written(line):
        if each.flag not in without and not _ELSEWHERE.match(each.flag):
            argv += [each.flag, *each.values]
    return argv


def ask(how: str, questions: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """What vLLM itself makes of argument lists; tests/lint/resolve.py says how far it goes."""
    if not INTERPRETER or not Path(INTERPRETER).exists():
        pytest.fail("TUNER_TEST_VLLM names no interpreter that has vLLM: run make test-vllm")
    done = subprocess.run(
        [INTERPRETER, str(Path(__file__).parent / "resolve.py"), how],
        input=json.dumps(questions), capture_output=True, text=True, timeout=WATCHDOG_S, check=False,
        env={**os.environ, **ENV, "VLLM_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = dict(
        json.loads(each) for each in done.stdout.splitlines() if each.startswith("[")
    )
    assert found.keys() == questions.keys()
    return found


def refused(line: str) -> list[str]:
    """Why lint says that 0.32 refuses this command line."""
    (engine,) = subject.engines(f"vllm serve {line}")
    _, findings = flags.check(engine.source, FACTS_CUDA, [])
    return [each.sentence for each in findings if each.id in REFUSED]


@pytest.mark.vllm
def test_vllm_refuses_the_lines_that_lint_calls_refused_and_takes_the_others(tmp_path: Path) -> None:
    """Public lines by the server's own parser; what the parser takes and lint refuses, by the resolution."""
    planted = [each for each in TABLE if each.line.startswith("vllm serve") and "version" not in each.against]
    lines = [line for _, line in COMMANDS] + [each.line.removeprefix("vllm serve ") for each in planted]
    listed = {str(number): line for number, line in enumerate(dict.fromkeys(lines))}
    by_lint = {number: refused(line) for number, line in listed.items()}
    argv = {number: subject.engines(f"vllm serve {line}")[0].source.words for number, line in listed.items()}
    told = ask("parse", argv)
    all_missed = [listed[n] for n in listed if isinstance(told[n], dict) and not by_lint[n]]
    # Keys inside an object differ from release to release, and no table of them is shipped.
    missed = [line for line in all_missed if "--compilation-config" not in line]
    doubtful = {n: argv[n] for n in listed if by_lint[n] and not isinstance(told[n], dict)}
    model = write(tmp_path / "model", max_position_embeddings=32768)
    resolved = ask("resolve", {n: ["--model", model, *argv[n][1:]] for n in doubtful})
    false = [(listed[n], by_lint[n]) for n in doubtful if not isinstance(resolved[n], dict)]
    refusals = sum(isinstance(each, dict) for each in told.values())
    print(f"{len(listed)} lines, {refusals} refused by the parser, {len(all_missed)} of them not by lint")
    assert refusals >= 30
    assert false == []
    assert missed == []


def changes(one: object, other: object, idle: Collection[str]) -> list[str]:
    """Where two configurations differ, apart from addresses and the records of idle flags themselves."""
    return [
        f"{x[:300]} | {y[:300]}"
        for x, y in zip(_plain(one, idle).splitlines(), _plain(other, idle).splitlines(), strict=True)
        if x != y
    ]


def _plain(text: object, idle: Collection[str]) -> str:
    names = [flag.removeprefix("--no-").removeprefix("--").replace("-", "_") for flag in idle]
    records = "".join(rf"|\b{name}=[^,)]*|'{name}': [^,}}]*" for name in names)
    return re.sub(rf"0x[0-9a-f]+|tcp://[\w.:]*|ipc://[\w./-]*{records}", "", str(text))


@pytest.mark.vllm
def test_no_flag_is_called_idle_that_changes_the_configuration(tmp_path: Path) -> None:
    model = write(tmp_path / "model", max_position_embeddings=32768)
    listed = list(dict.fromkeys(claims()))
    questions: dict[str, list[str]] = {}
    for number, claim in enumerate(listed):
        without = words(claim.line, model, (claim.flag,))
        idle = [
            word
            for each in written(claim.line)
            if each.flag == claim.flag
            for word in (each.flag, *each.values)
        ]
        questions |= {f"{number} with": [*without, *idle], f"{number} without": without}
    told = ask("resolve", questions)
    false, open_ = [], []
    for number, claim in enumerate(listed):
        one, other = told[f"{number} with"], told[f"{number} without"]
        if isinstance(one, dict) or isinstance(other, dict):
            open_.append((claim, one if isinstance(one, dict) else other))
        elif found := changes(one, other, (claim.flag,)):
            false.append((claim, found))
    print(f"{len(listed)} claims, {len(open_)} that vLLM does not resolve here, {len(false)} false")
    assert len(listed) >= 40
    assert false == []
    assert len(open_) <= len(listed) // 5, open_


BOOTED, PIECES = 30, 5


def bootable() -> dict[str, list[str]]:
    """Public command lines that differ in what a tiny model on a CPU can be given, and what lint calls
    idle of that; lines with idle flags first, as many as are booted.
    """
    found: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for _, line in COMMANDS:
        argv = words(line, "m")
        (engine,) = subject.engines(f"vllm serve {line}")
        _, findings = flags.check(engine.source, FACTS, [])
        idle = [each.flag for each in findings if each.id in SILENT and each.flag in argv]
        if len(argv) > len(words("m", "m")):
            found.setdefault(tuple(argv), (line, idle))
    return dict(sorted(found.values(), key=lambda each: not each[1])[:BOOTED])


@pytest.mark.vllm_full
@pytest.mark.parametrize("piece", range(PIECES))
def test_public_command_lines_boot_and_idle_flags_are_idle(tmp_path: Path, piece: int) -> None:
    """Every engine answers, and the configuration that it runs with is the same without the idle flags."""
    model = write(tmp_path / "model", max_position_embeddings=32768, torch_dtype="float32")
    tiny = ("--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
    assert len(bootable()) == BOOTED
    lines = dict(list(bootable().items())[piece::PIECES])
    questions: dict[str, list[str]] = {}
    for line, idle in lines.items():
        questions[f"with {line}"] = [*words(line, model), *tiny]
        if idle:
            questions[f"without {line}"] = [*words(line, model, idle), *tiny]
    alike = {tuple(argv): name for name, argv in questions.items()}  # what strips to the same boots once
    engines = ask("boot", {name: argv for argv, name in alike.items()})
    told = {name: engines[alike[tuple(argv)]] for name, argv in questions.items()}
    failed = {name: each for name, each in told.items() if isinstance(each, dict)}
    for line, idle in lines.items():
        end = "failed" if f"with {line}" in failed else "booted"
        print(f"{end}  idle: {' '.join(idle) or '-':40} {line}")
    false = [
        (line, idle, found)
        for line, idle in lines.items()
        if idle
        and not {f"with {line}", f"without {line}"} & failed.keys()
        and (found := changes(told[f"with {line}"], told[f"without {line}"], idle))
    ]
    print(f"{len(lines)} lines, {len(engines)} engines, {len(failed)} failed; {len(false)} false")
    assert false == []
    assert failed == {}


@pytest.mark.vllm
def test_the_url_of_a_running_server_is_linted(real_server: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """By /server_info, and where the server does not have it by its metrics."""
    url = f"http://127.0.0.1:{real_server.server.port}"
    (by_info,) = subject.engines(url)
    answer = subject._json
    monkeypatch.setattr(
        subject, "_json", lambda at, **how: None if "server_info" in at else answer(at, **how)
    )
    (by_metrics,) = subject.engines(url)
    for engine in (by_info, by_metrics):
        linted = run.lint(engine, run.LintOptions(card="cpu"), os.environ)
        assert linted.version.startswith(VERSION)
        assert linted.missing["defaults"]
        assert engine.live is not None
        assert engine.live.tokens
        assert engine.live.tokens % ENGINE_BLOCK == 0
        assert engine.effective["block_size"] == ENGINE_BLOCK
    assert by_info.effective["max_num_seqs"] == 16
    assert len(by_info.effective) > len(by_metrics.effective)
