"""From an engine's last words to a verdict: which kind of end it was, whose fault, and how bad."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed
from tuner.records import Violation

Phase = Literal["startup", "run"]
Outcome = Literal["infeasible", "aborted", "study"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to end. `rank` orders causes: 0 a root cause, 1 general, 3 points further up, 4 context."""

    outcome: Outcome
    retries: int
    sentence: str
    pattern: str = ""
    rank: int = 0


KINDS: dict[str, Kind] = {
    "bad_flag": Kind(
        outcome="study",
        retries=0,
        sentence="the engine refused an argument",
        pattern=r"error: (unrecognized arguments:|ambiguous option|argument \S+: (invalid|expected ))",
    ),
    "port_in_use": Kind(
        outcome="aborted",
        retries=2,
        sentence="the port was taken by another process",
        pattern=r"\[Errno (98|48)\].*[Aa]ddress already in use|ZMQError: Address already in use",
    ),
    "gpu_busy": Kind(
        outcome="aborted",
        retries=2,
        sentence="another process held GPU memory",
        pattern=r"Free memory on device .*is less than desired GPU memory utilization"
        r"|is less than the engine's budget after excluding",
    ),
    "profiling_race": Kind(
        outcome="aborted",
        retries=2,
        sentence="GPU memory changed hands while the engine measured it",
        pattern=r"Error in memory profiling",
    ),
    "no_kv_memory": Kind(
        outcome="infeasible",
        retries=0,
        sentence="no memory left for the KV cache",
        pattern=r"No available memory for the cache blocks",
    ),
    "max_len_gt_kv": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the KV cache is too small for one request of the maximum length",
        pattern=r"To serve at least one request with the models?'?s? max seq len"
        r"|max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV cache",
    ),
    "max_len_gt_model": Kind(
        outcome="study",
        retries=0,
        sentence="max-model-len is larger than the model allows",
        pattern=r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len",
    ),
    "oom_warmup": Kind(
        outcome="infeasible",
        retries=0,
        sentence="out of GPU memory while warming up; a lower max_num_seqs may fit",
        pattern=r"out of memory occurred when warming up (sampler|pooler) with",
    ),
    "oom": Kind(
        outcome="infeasible",
        retries=0,
        sentence="out of memory",
        pattern=r"OutOfMemoryError|(CUDA|HIP) ([Ee]rror: )?out of memory|desired CPU memory utilization",
    ),
    "shm_full": Kind(
        outcome="aborted",
        retries=2,
        sentence="shared memory (/dev/shm) is full",
        pattern=r"Insufficient space in /dev/shm|No space left on device.*(/dev/shm|psm_)",
    ),
    "disk_full": Kind(
        outcome="aborted", retries=2, sentence="the disk is full", pattern=r"No space left on device"
    ),
    "block_size": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the attention backend refuses the block size",
        pattern=r"No common block size for|block_size not supported",
    ),
    "attention_backend": Kind(
        outcome="infeasible",
        retries=0,
        sentence="no attention backend takes this configuration",
        pattern=r"No valid attention backend found|Selected backend .* is not valid for this configuration",
    ),
    "model_missing": Kind(
        outcome="study",
        retries=0,
        sentence="the model cannot be found",
        pattern=r"HFValidationError|LocalEntryNotFoundError|RepositoryNotFoundError|GatedRepoError"
        r"|is not a valid model identifier|Can't load the configuration of"
        r"|No such file or directory: .*config\.json",
    ),
    "nccl": Kind(
        outcome="aborted",
        retries=2,
        sentence="communication between GPUs failed",
        pattern=r"NCCL error|DistBackendError|ncclUnhandledCudaError|ProcessGroupNCCL.*(timeout|abort)",
    ),
    "compile_cache": Kind(
        outcome="aborted",
        retries=1,
        sentence="the compile cache is damaged; it was wiped",
        pattern=r"failed to get the hash of the compiled graph|corrupted compilation artifact"
        r"|Expected tensors only, but got",
    ),
    "v0_fallback": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the engine fell back to V0, which is another engine",
        pattern=r"Falling back to V0|is not supported by the V1 Engine|VLLM_USE_V1=1 is not supported",
    ),
    "init_timeout": Kind(
        outcome="infeasible",
        retries=1,
        sentence="the engine was not ready within its deadline",
        pattern=r"Timed out waiting for engine core processes to start|did not complete startup within",
        rank=1,
    ),
    "config_invalid": Kind(
        outcome="infeasible",
        retries=0,
        sentence="the engine refused the configuration",
        pattern=r"validation errors? for \w*Config|must be greater than or equal to max_num_seqs"
        r"|is smaller than max_model_len|Concurrent Partial Prefill is not supported"
        r"|Not enough allowed NUMA nodes",
        rank=1,
    ),
    "hang": Kind(
        outcome="infeasible",
        retries=1,
        sentence="the engine's processes stopped answering each other",
        pattern=r"No available shared memory broadcast block found|RPC call to \w+ timed out",
        rank=4,
    ),
    "engine_dead": Kind(
        outcome="infeasible",
        retries=1,
        sentence="the engine died",
        pattern=r"EngineDeadError|EngineCore encountered (an issue|a fatal error)"
        r"|MQLLMEngine is already dead|WorkerProc initialization failed|Worker failed with error"
        r"|Engine core initialization failed|EngineCore failed to start|Engine process failed to start",
        rank=3,
    ),
    "crashed": Kind(outcome="infeasible", retries=1, sentence="the engine ended without a known cause"),
    "refused": Kind(outcome="infeasible", retries=1, sentence="the engine answers with errors"),
    "host_oom": Kind(
        outcome="infeasible", retries=1, sentence="the kernel killed the engine: host memory is out"
    ),
    "killed": Kind(outcome="aborted", retries=2, sentence="the engine was killed from outside"),
    "frozen": Kind(
        outcome="infeasible", retries=1, sentence="the engine answers /health but computes nothing any more"
    ),
    "thrash": Kind(
        outcome="infeasible", retries=1, sentence="requests preempt each other and tokens stand still"
    ),
    "stale_server": Kind(outcome="aborted", retries=2, sentence="another server answers on our port"),
    "gpu_dirty": Kind(outcome="aborted", retries=2, sentence="GPU memory did not come back"),
    "foreign_use": Kind(outcome="aborted", retries=2, sentence="the GPU is in use by somebody else"),
    "hard_fault": Kind(outcome="aborted", retries=0, sentence="engine processes survive SIGKILL"),
    "kv_drift": Kind(outcome="aborted", retries=1, sentence="a first boot got less KV cache"),
}

FLAGS_OF = {
    "preemption": ("preemption-mode", "swap-space", "kv-offloading-size", "kv-offloading-backend"),
    "enable-prefix-caching": ("no-enable-prefix-caching",),
    "enable-chunked-prefill": ("no-enable-chunked-prefill",),
}
"""Knobs whose flags bear other names than the knob."""

FREE_SHARE = 0.95
"""A card with so much of its memory free is in nobody's use: driver and context take the rest."""

NODE_FAULTS = frozenset({"hard_fault", "gpu_dirty", "nccl"})
"""Causes after which the node is quarantined once the retries are used up; a hard fault at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a launch ended. `reason` is one sentence, `evidence` the log line that says it."""

    kind: str
    outcome: Outcome
    retries: int
    reason: str
    evidence: str = ""
    violation: Violation = field(default_factory=Violation)

    def error(self) -> EngineError:
        """The exception that the caller acts on."""
        if self.outcome == "infeasible":
            return Infeasible(self.reason, cause=self.kind, evidence=self.evidence, violation=self.violation)
        wanted = Aborted if self.outcome == "aborted" else StudyFailed
        return wanted(self.reason, cause=self.kind, evidence=self.evidence)


def retries(cause: str | None, phase: Phase = "startup") -> int:
    """How often an attempt with this cause is repeated; out of memory under load is confirmed once."""
    if cause == "oom" and phase == "run":
        return 1
    return KINDS[cause].retries if cause in KINDS else 0


def verdict(kind: str, *, detail: str = "", evidence: str = "", phase: Phase = "startup") -> Verdict:
    """The verdict of a known kind; `detail` is added to its sentence."""
    about = KINDS[kind]
    return Verdict(
        kind=kind,
        outcome=about.outcome,
        retries=retries(kind, phase),
        reason=f"{about.sentence}: {detail}" if detail else about.sentence,
        evidence=evidence,
        violation=_violation(kind, evidence, phase),
    )


def classify(
    text: str,
    exit_code: int | None,
    phase: Phase,
    *,
    asked: Iterable[str] = (),
    oom_killed: bool = False,
    held_gib: float = 0.0,
) -> Verdict:
    """Why an engine ended, from its log, its exit code (None: it still runs) and the knobs it was asked for.

    The first root cause in the log wins over later ones, any root cause over general errors, these over
    wrappers. A refusal is the candidate's fault only when it names a knob of the candidate. `held_gib` of GPU
    memory were in use before anything of ours ran: who asks for what was free then asks for too much.
    """
    found = first_cause(text)
    if found is not None and KINDS[found[0]].rank < 3:
        kind, line = found
        if kind == "gpu_busy" and _asks_too_much(line, held_gib):
            kind = "oom"
        return _blame(verdict(kind, detail=_detail(kind, line), evidence=line, phase=phase), list(asked))
    if oom_killed and (exit_code == -9 or found is not None):
        return verdict("host_oom", evidence=last_line(text), phase=phase)
    if exit_code == -9:
        return verdict("killed", evidence=last_line(text), phase=phase)
    if exit_code is not None and exit_code == 2 and phase == "startup":
        return _blame(verdict("bad_flag", detail=last_line(text), evidence=last_line(text)), list(asked))
    if found is not None and (found[0] != "hang" or exit_code is None):  # also said of slow compiles
        detail = _worker_words(text) or _exit_words(exit_code)
        return verdict(found[0], detail=detail, evidence=found[1], phase=phase)
    return verdict("crashed", detail=_exit_words(exit_code), evidence=last_line(text), phase=phase)


def first_cause(text: str) -> tuple[str, str] | None:
    """(kind, line) of the earliest line of the best rank, None when nothing known is said."""
    best: tuple[int, str, str] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not _ANY.search(line) or re.search(r"\braise \w.*\($", line):
            continue
        kind = next((k for k, pattern in _COMPILED if pattern.search(line)), None)
        if kind is not None and (best is None or KINDS[kind].rank < best[0]):
            if line.endswith("Config"):  # a validation error says what is wrong on its next lines
                line = " ".join([line, *(more.strip() for more in lines[number + 1 : number + 3])])
            best = (KINDS[kind].rank, kind, line.strip()[:500])
            if best[0] == 0:
                break
    return None if best is None else (best[1], best[2])


def line_of(kind: str, text: str) -> str | None:
    """The first line that says a kind, None when none does."""
    pattern = re.compile(KINDS[kind].pattern)
    return next((line.strip()[:500] for line in text.splitlines() if pattern.search(line)), None)


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def refused_flags(line: str) -> tuple[str, ...]:
    """Long flags that an argparse error names, without dashes in front."""
    return tuple(flag.removeprefix("--") for flag in re.findall(r"--[a-z][a-z0-9-]*", line))


def _blame(given: Verdict, asked: list[str]) -> Verdict:
    """A refusal of something that the candidate does not set is the study's own mistake."""
    knobs = {name.replace("_", "-") for name in asked}
    flags = {flag for knob in knobs for flag in (knob, *FLAGS_OF.get(knob, ()))}
    if given.kind == "bad_flag":
        ours = [flag for flag in refused_flags(given.evidence) if flag in flags]
        outcome: Outcome = "infeasible" if ours else "study"
    elif given.kind == "config_invalid" and not knobs:
        outcome = "study"
    else:
        return given
    return Verdict(
        kind=given.kind,
        outcome=outcome,
        retries=given.retries,
        reason=given.reason,
        evidence=given.evidence,
        violation=Violation(err=1.0) if outcome == "infeasible" else Violation(),
    )


def _detail(kind: str, line: str) -> str:
    """What is worth repeating of the line: an error's own words, without the logger's front matter."""
    if kind in ("bad_flag", "block_size", "config_invalid", "max_len_gt_model", "model_missing"):
        words = re.sub(r"^.*?(?=error: |\w*Error\b|validation error)", "", line)
        return words[:240]
    if match := re.search(r"warming up \w+ with (\d+) dummy requests", line):
        return f"{match.group(1)} sequences"
    if match := _NEEDED.search(line):
        return f"{match.group(1)} GiB needed, {match.group(2)} GiB there"
    if match := _FREE.search(line):
        free, total, share, desired = match.groups()
        return f"{desired} GiB wanted ({share} of the card), {free} of {total} GiB free"
    return ""


def _asks_too_much(line: str, held_gib: float) -> bool:
    """Whether the card was as good as free, so that no other process is to blame."""
    match = _FREE.search(line)
    return match is not None and float(match.group(1)) + held_gib >= FREE_SHARE * float(match.group(2))


def _exit_words(code: int | None) -> str:
    if code is None:
        return ""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _worker_words(text: str) -> str:
    """Which worker ended first and how, where vLLM knew: the server's own exit code is then 0."""
    match = re.search(r"Worker proc (\S+) died unexpectedly \(exit code: (-?\d+)\)", text)
    return f"{match.group(1)} ended first, {_exit_words(int(match.group(2)))}" if match else ""


def _violation(kind: str, line: str, phase: Phase) -> Violation:
    """Graded: `kv` = missing share of the KV memory needed (1 unknown), `oom` = missing share of the card
    (0.5 unknown), one more under load; `err` = 1 for every other end that is the candidate's fault."""
    if kind in ("no_kv_memory", "max_len_gt_kv"):
        match = _NEEDED.search(line) or _TOKENS.search(line)
        if match is None:
            return Violation(kv=1.0)
        needed, there = float(match.group(1)), float(match.group(2))
        return Violation(kv=max(0.01, 1.0 - max(there, 0.0) / needed) if needed > 0 else 1.0)
    if kind in ("oom", "oom_warmup"):
        share = 0.5
        if match := _TRIED.search(line):
            share = _missing_share(match)
        elif match := _FREE.search(line):
            free, total, _, desired = (float(group) for group in match.groups())
            share = min(1.0, max(0.01, (desired - free) / total)) if total else 0.5
        return Violation(oom=share + (1.0 if phase == "run" else 0.0))
    return Violation(err=1.0) if KINDS[kind].outcome == "infeasible" else Violation()


def _missing_share(match: re.Match[str]) -> float:
    tried, total, free = (
        float(match.group(number)) * _UNITS[match.group(number + 1)] for number in (1, 3, 5)
    )
    return min(1.0, max(0.01, (tried - free) / total)) if total else 0.5


_UNITS = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}
_NEEDED = re.compile(
    r"\(([\d.]+) GiB KV cache is needed, which is larger than the available KV cache memory "
    r"\((-?[\d.]+) GiB\)"
)
_TOKENS = re.compile(
    r"max seq len \((\d+)\) is larger than the maximum number of tokens .* KV cache \((\d+)\)"
)
_TRIED = re.compile(
    r"Tried to allocate ([\d.]+) (\w+)\..*?total capacity of ([\d.]+) (\w+) of which ([\d.]+) (\w+) is free"
)
_FREE = re.compile(
    r"memory on (?:device|node) \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired .PU memory "
    r"utilization \(([\d.]+), ([\d.]+) GiB\)"
)
_COMPILED = [(kind, re.compile(about.pattern)) for kind, about in KINDS.items() if about.pattern]
_ANY = re.compile("|".join(about.pattern for about in KINDS.values() if about.pattern))
