"""Why a launch failed: the kind of failure (by log and exit code), whose fault it is, and how bad it is."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from tuner.adapters import adapter_of
from tuner.engine.log import RootCause, root_cause, secondary, split
from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed
from tuner.records import Violation

Phase = Literal["startup", "run"]
Outcome = Literal["infeasible", "aborted", "study"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """One way in which a launch ends.

    `rank` orders what a log shows: 0 a root cause, 1 a general error, 3 a wrapper of another error, 4 a line
    that also appears when all is well. `knobs` can cure it: in a study that turns none of them, every
    candidate fails so. `by_candidate`: once another candidate has served, this one is at fault. `warned`: the
    engine logs it as a warning or as information. The patterns of an engine's words are in its adapter
    (`tuner.adapters`).
    """

    outcome: Outcome
    retries: int
    sentence: str
    rank: int = 0
    knobs: tuple[str, ...] = ()
    by_candidate: bool = False
    warned: bool = False


_MEMORY = (
    "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "cpu_offload_gb",
    "quantization", "dtype", "enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
    "num_gpu_blocks_override", "speculative_config",
)  # fmt: skip


# Faults of model, weights, driver and build: they are looked for first, and only in the root cause.
STUDY_KINDS: dict[str, FailureKind] = {
    "model_missing": FailureKind(
        outcome="study",
        retries=0,
        sentence="the model cannot be found",
    ),
    "model_gated": FailureKind(
        outcome="study",
        retries=0,
        sentence="no permission to read the model: accept its licence, or give HF_TOKEN in engine.env",
    ),
    "remote_code": FailureKind(
        outcome="study",
        retries=0,
        sentence="the model needs its own code, which is not trusted (engine.args: trust-remote-code)",
    ),
    "model_unknown": FailureKind(
        outcome="study",
        retries=0,
        sentence="this engine does not know the model's architecture",
    ),
    "weights": FailureKind(
        outcome="study",
        retries=0,
        sentence="the model's weights cannot be loaded",
        knobs=("load_format", "quantization"),
        by_candidate=True,
    ),
    "tokenizer": FailureKind(
        outcome="study",
        retries=0,
        sentence="the model's tokenizer cannot be loaded",
        knobs=("tokenizer_mode",),
    ),
    "driver": FailureKind(
        outcome="study",
        retries=0,
        sentence="the GPU's driver does not support this engine",
    ),
    "image": FailureKind(
        outcome="study",
        retries=0,
        sentence="this build of the engine does not run on this machine",
        by_candidate=True,
    ),
    "interpreter": FailureKind(
        outcome="study",
        retries=0,
        sentence="the interpreter has no vLLM that can be imported",
    ),
    "package": FailureKind(
        outcome="study",
        retries=0,
        sentence="the engine lacks a Python package",
        knobs=("attention_backend", "kv_offloading_backend", "kv_transfer_config", "moe_backend",
               "linear_backend", "quantization", "speculative_config", "load_format"),
        by_candidate=True,
    ),
    "dtype": FailureKind(
        outcome="study",
        retries=0,
        sentence="the card or the model does not take this number format",
        knobs=("dtype",),
        by_candidate=True,
    ),
    "quantization": FailureKind(
        outcome="study",
        retries=0,
        sentence="the quantization does not fit the card or the model",
        knobs=("quantization", "tensor_parallel_size", "dtype"),
        by_candidate=True,
    ),
    "capability": FailureKind(
        outcome="study",
        retries=0,
        sentence="the card is too old for this configuration",
        knobs=("dtype", "quantization", "kv_cache_dtype", "attention_backend"),
        by_candidate=True,
    ),
    "parallel": FailureKind(
        outcome="study",
        retries=0,
        sentence="the parallel sizes do not fit the model or the node",
        knobs=("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
               "decode_context_parallel_size"),
        by_candidate=True,
    ),
}  # fmt: skip

KINDS: dict[str, FailureKind] = {
    **STUDY_KINDS,
    "bad_flag": FailureKind(
        outcome="study",
        retries=0,
        sentence="the engine refused an argument",
    ),
    "port_in_use": FailureKind(
        outcome="aborted",
        retries=2,
        sentence="the port was taken by another process",
    ),
    "gpu_busy": FailureKind(
        outcome="aborted",
        retries=2,
        sentence="another process held GPU memory",
    ),
    "profiling_race": FailureKind(
        outcome="aborted",
        retries=2,
        sentence="another process took or freed GPU memory while the engine measured it",
    ),
    "no_kv_memory": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="no memory left for the KV cache",
        knobs=_MEMORY,
    ),
    "max_len_gt_kv": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="the KV cache is too small for one request of the maximum length",
        knobs=_MEMORY,
    ),
    "max_len_gt_model": FailureKind(
        outcome="study",
        retries=0,
        sentence="max-model-len is larger than the model allows",
        knobs=("max_model_len",),
    ),
    "mamba_blocks": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="max_num_seqs is larger than the number of Mamba cache blocks",
        knobs=_MEMORY,
    ),
    "oom_warmup": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="out of GPU memory while warming up; a lower max_num_seqs may fit",
        knobs=_MEMORY,
    ),
    "oom": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="out of memory",
        knobs=_MEMORY,
    ),
    "shm_full": FailureKind(
        outcome="aborted",
        retries=2,
        sentence="shared memory (/dev/shm) is full",
    ),
    "disk_full": FailureKind(outcome="aborted", retries=2, sentence="the disk is full"),
    "block_size": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="the attention backend refuses the block size",
        knobs=("block_size", "attention_backend", "kv_cache_dtype"),
    ),
    "attention_backend": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="no attention backend takes this configuration",
        knobs=("attention_backend", "block_size", "kv_cache_dtype", "dtype"),
    ),
    "nccl": FailureKind(
        outcome="aborted",
        retries=2,
        sentence="communication between GPUs failed",
    ),
    "compile_cache": FailureKind(
        outcome="aborted",
        retries=1,
        sentence="the compile cache was damaged; it has been emptied",
    ),
    "v0_fallback": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="the engine fell back to V0, which is another engine",
        warned=True,
        knobs=("preemption", "preemption_mode"),
    ),
    "init_timeout": FailureKind(
        outcome="infeasible",
        retries=1,
        sentence="the engine was not ready within its deadline",
        rank=1,
    ),
    "config_invalid": FailureKind(
        outcome="infeasible",
        retries=0,
        sentence="the engine refused the configuration",
        rank=1,
    ),
    "hang": FailureKind(
        outcome="infeasible",
        retries=1,
        sentence="the engine's processes stopped answering each other",
        rank=4,
        warned=True,
    ),
    "engine_dead": FailureKind(
        outcome="infeasible",
        retries=1,
        sentence="the engine died",
        rank=3,
    ),
    "crashed": FailureKind(
        outcome="infeasible", retries=1, sentence="the engine ended without a known cause"
    ),
    "refused": FailureKind(outcome="infeasible", retries=1, sentence="the engine answers with errors"),
    "host_oom": FailureKind(
        outcome="infeasible",
        retries=1,
        sentence="the kernel killed the engine, because the host's memory was full",
    ),
    "killed": FailureKind(outcome="aborted", retries=2, sentence="the engine was killed from outside"),
    "frozen": FailureKind(
        outcome="infeasible", retries=1, sentence="the engine answers /health but computes nothing any more"
    ),
    "thrash": FailureKind(
        outcome="infeasible", retries=1, sentence="requests preempt each other, and no token comes out"
    ),
    "stale_server": FailureKind(outcome="aborted", retries=2, sentence="another server answers on our port"),
    "gpu_dirty": FailureKind(outcome="aborted", retries=2, sentence="GPU memory was not freed"),
    "foreign_use": FailureKind(outcome="aborted", retries=2, sentence="the GPU is in use by somebody else"),
    "hard_fault": FailureKind(outcome="aborted", retries=0, sentence="engine processes survive SIGKILL"),
    "kv_drift": FailureKind(
        outcome="aborted", retries=1, sentence="the first boot got less KV cache than later boots"
    ),
}

# The flags that one knob covers, where there are several.
FLAGS_OF = {"preemption": ("preemption-mode", "swap-space", "kv-offloading-size", "kv-offloading-backend")}

# A card with so much of its memory free is unused: driver and context take the rest.
FREE_SHARE = 0.95

# Exit codes of a shell or a container runtime that could not start the program.
NEVER_RAN = frozenset({125, 126, 127})

# Causes after which the node is quarantined once the retries are used up; a hard fault at once.
NODE_FAULTS = frozenset({"hard_fault", "gpu_dirty", "nccl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailure:
    """Why a launch failed. `reason` is one sentence, `evidence` the log line that shows it."""

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


def asks_its_share(kind: str | None, reason: str) -> bool:
    """Whether an engine found less free memory at its start than its share: that depends on no other knob."""
    return kind == "oom" and _ASKED.search(reason) is not None


def mending(kind: str, reason: str) -> frozenset[str]:
    """The knobs that can mend a failure, by its kind and its sentence."""
    if asks_its_share(kind, reason):
        return frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})
    return frozenset(KINDS[kind].knobs) if kind in KINDS else frozenset()


def retries(cause: str | None, phase: Phase = "startup") -> int:
    """How often an attempt with this cause is repeated; out of memory under load is confirmed once."""
    if cause == "oom" and phase == "run":
        return 1
    return KINDS[cause].retries if cause in KINDS else 0


def failed(kind: str, *, detail: str = "", evidence: str = "", phase: Phase = "startup") -> LaunchFailure:
    """A failure of a known kind; `detail` is added to its sentence."""
    about = KINDS[kind]
    return LaunchFailure(
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
    engine: str = "vllm",
) -> LaunchFailure:
    """Why an engine ended, by its log, its exit code (None: it still runs) and its configuration (knobs and
    flags).

    A refused argument (exit code 2) comes first, then a root cause in model, weights, driver or build. Then
    the first root cause in the log counts, else the first general error, else the first wrapper; if no kind
    fits, the line of the root cause is the reason. A refusal is the candidate's fault only if it names a knob
    of the candidate. `held_gib` of GPU memory were in use before the launch: a candidate that needs more than
    was free is out of memory, and no other process is to blame.
    """
    refused = _refusal(text) if exit_code == 2 and phase == "startup" else ""
    if refused:
        return _blame(failed("bad_flag", detail=_detail("bad_flag", refused), evidence=refused), list(asked))
    words = _words(engine)
    cause = root_cause(text) or _last_words(text, words)
    kind = None if cause is None else words.study_kind(cause.words)
    if exit_code in NEVER_RAN and phase == "startup":
        kind, cause = kind or "image", cause or RootCause(line=_exit_words(exit_code), words="")
    if cause is not None and kind is not None:
        return failed(kind, detail=cause.line, evidence=cause.line, phase=phase)
    found = words.first_cause(text)
    if found is not None and KINDS[found[0]].rank < 3:
        kind, line = found
        if kind == "gpu_busy" and _asks_too_much(line, held_gib):
            kind = "oom"
        return _blame(failed(kind, detail=_detail(kind, line), evidence=line, phase=phase), list(asked))
    own = None if cause is None or words.general(cause.line) else cause.line
    if own is not None and secondary(own):  # it only follows from the end of a worker, which left no words
        own = _worker_words(text) or own
    return _unknown(text, exit_code, phase, found, own, oom_killed=oom_killed)


def _unknown(
    text: str,
    exit_code: int | None,
    phase: Phase,
    found: tuple[str, str] | None,
    own: str | None,
    *,
    oom_killed: bool,
) -> LaunchFailure:
    """The failure where the log names no known cause: the kernel's, or the root cause's `own` line."""
    if oom_killed and (exit_code == -9 or found is not None):
        return failed("host_oom", evidence=last_line(text), phase=phase)
    if exit_code == -9:
        return failed("killed", evidence=last_line(text), phase=phase)
    if found is not None and (found[0] != "hang" or exit_code is None):  # also said of slow compiles
        detail = own or _worker_words(text) or _exit_words(exit_code)
        return failed(found[0], detail=detail, evidence=own or found[1], phase=phase)
    return failed(
        "crashed", detail=own or _exit_words(exit_code), evidence=own or last_line(text), phase=phase
    )


class _Words:
    """The patterns of one kind of engine: which log lines mean which kind of failure."""

    def __init__(self, engine: str) -> None:
        patterns = {kind: re.compile(text) for kind, text in adapter_of(engine).failures.items()}
        self._study = [(kind, pattern) for kind, pattern in patterns.items() if kind in STUDY_KINDS]
        self._known = [(kind, pattern) for kind, pattern in patterns.items() if kind not in STUDY_KINDS]
        self.any = re.compile("|".join(pattern.pattern for _, pattern in self._known) or r"(?!)")

    def general(self, line: str) -> bool:
        """Whether a line only reports that the engine ended."""
        return any(KINDS[kind].rank >= 3 and pattern.search(line) for kind, pattern in self._known)

    def study_kind(self, words: str) -> str | None:
        """Which fault of model, weights, driver or build the words of an exception mean; None: none
        of them.
        """
        return next((kind for kind, pattern in self._study if pattern.search(words)), None)

    def first_cause(self, text: str) -> tuple[str, str] | None:
        """(kind, line) of the earliest line of the best rank, None if no line has a known kind."""
        best: tuple[int, str, str] | None = None
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if not self.any.search(line) or re.search(r"\braise \w.*\($", line):
                continue
            quiet = split(line)[0].quiet
            said = (k for k, p in self._known if p.search(line) and (KINDS[k].warned or not quiet))
            kind = next(said, None)
            if kind is not None and (best is None or KINDS[kind].rank < best[0]):
                if line.endswith("Config"):  # a validation error says what is wrong on its next lines
                    line = " ".join([line, *(more.strip() for more in lines[number + 1 : number + 3])])
                best = (KINDS[kind].rank, kind, line.strip()[:500])
                if best[0] == 0:
                    break
        return None if best is None else (best[1], best[2])


_words = cache(_Words)


def first_cause(text: str, engine: str = "vllm") -> tuple[str, str] | None:
    """(kind, line) of the log line that shows the cause best, None if no line has a known kind."""
    return _words(engine).first_cause(text)


def _last_words(text: str, words: _Words) -> RootCause | None:
    """The last line, for a log without an exception: the words of an interpreter, a shell or a container
    runtime.
    """
    last = last_line(text)
    if not last or split(last)[0].quiet or words.any.search(last):
        return None
    return RootCause(line=last, words=last)


def _refusal(text: str) -> str:
    """The error of argparse, with the lines that belong to it; empty without one."""
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if re.search(r"^[^\s:][^:]*: error: ", line)]
    if not at:
        return ""
    more = [line.strip() for line in lines[at[-1] + 1 : at[-1] + 3] if line.startswith(" ")]
    return re.sub(r"\s*\[type=\w+, .*$", "", " ".join([lines[at[-1]].strip(), *more]))[:500]


def line_of(kind: str, text: str, engine: str = "vllm") -> str | None:
    """The first line that shows a kind, None when none does."""
    pattern = adapter_of(engine).failures.get(kind)
    lines = text.splitlines() if pattern else []
    return next((line.strip()[:500] for line in lines if re.search(pattern or "", line)), None)


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def refused_flags(line: str) -> tuple[str, ...]:
    """Long flags that an argparse error names, without dashes in front."""
    return tuple(flag.removeprefix("--") for flag in re.findall(r"--[a-z][a-z0-9-]*", line))


def _blame(given: LaunchFailure, asked: list[str]) -> LaunchFailure:
    """The failure, as the study's own mistake where the engine refused what the candidate does not set."""
    knobs = {name.removeprefix("--").removeprefix("no-").replace("_", "-") for name in asked}
    flags = {flag for knob in knobs for flag in (knob, *FLAGS_OF.get(knob, ()))}
    if given.kind == "bad_flag":
        ours = [flag for flag in refused_flags(given.evidence) if flag.removeprefix("no-") in flags]
        outcome: Outcome = "infeasible" if ours else "study"
    elif given.kind == "config_invalid" and not knobs:
        outcome = "study"
    else:
        return given
    violation = Violation(err=1.0) if outcome == "infeasible" else Violation()
    return replace(given, outcome=outcome, violation=violation)


def _detail(kind: str, line: str) -> str:
    """The part of the line that a reason repeats: an error's own words, without the logger's prefix."""
    if kind in ("bad_flag", "block_size", "config_invalid", "max_len_gt_model"):
        words = re.sub(r"^.*?(?=error: |\w*Error\b|validation error)", "", line)
        return words[:240]
    if match := _MAMBA.search(line):
        return f"{match.group(1)} needed, {match.group(2)} available"
    if match := re.search(r"warming up \w+ with (\d+) dummy requests", line):
        return f"{match.group(1)} sequences"
    if match := _NEEDED.search(line):
        return f"{match.group(1)} GiB needed, {match.group(2)} GiB available"
    if match := _FREE.search(line):
        free, total, share, desired = match.groups()
        return f"{desired} GiB needed ({share} of the memory), {free} of {total} GiB free"
    return ""


def _asks_too_much(line: str, held_gib: float) -> bool:
    """Whether the card was free, apart from memory held before the launch: then no other process is
    to blame.
    """
    match = _FREE.search(line)
    return match is not None and float(match.group(1)) + held_gib >= FREE_SHARE * float(match.group(2))


def _exit_words(code: int | None) -> str:
    if code is None:
        return ""
    if code == -signal.SIGILL:
        return f"killed by signal {-code}: this processor lacks an instruction that the build uses"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _worker_words(text: str) -> str:
    """Which worker ended first and how, where vLLM knew: the server's own exit code is then 0."""
    match = re.search(r"Worker proc (\S+) died unexpectedly \(exit code: (-?\d+)\)", text)
    return f"{match.group(1)} ended first, {_exit_words(int(match.group(2)))}" if match else ""


def _violation(kind: str, line: str, phase: Phase) -> Violation:
    """Graded: `kv` = missing share of the KV memory needed (1 unknown), `oom` = missing share of the card
    (0.5 unknown), one more under load; `err` = 1 for every other end that is the candidate's fault."""
    if kind in ("no_kv_memory", "max_len_gt_kv", "mamba_blocks"):
        match = _NEEDED.search(line) or _TOKENS.search(line) or _MAMBA.search(line)
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


_ASKED = re.compile(r"GiB needed \([\d.]+ of the memory\)")
_UNITS = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}
_NEEDED = re.compile(
    r"\(([\d.]+) GiB KV cache is needed, which is larger than the available KV cache memory "
    r"\((-?[\d.]+) GiB\)"
)
_TOKENS = re.compile(
    r"max seq len \((\d+)\) is larger than the maximum number of tokens .* KV cache \((\d+)\)"
)
_MAMBA = re.compile(r"max_num_seqs \((\d+)\) exceeds (?:the )?available Mamba cache blocks \((\d+)\)")
_TRIED = re.compile(
    r"Tried to allocate ([\d.]+) (\w+)\..*?total capacity of ([\d.]+) (\w+) of which ([\d.]+) (\w+) is free"
)
_FREE = re.compile(
    r"memory on (?:device|node) \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired .PU memory "
    r"utilization \(([\d.]+), ([\d.]+) GiB\)"
)
