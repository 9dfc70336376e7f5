"""From an engine's last words to a verdict: which kind of end it was, whose fault, and how bad."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tuner.engine.kinds import KINDS, STUDY_KINDS, Outcome
from tuner.engine.rootcause import RootCause, root_cause, split
from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed
from tuner.records import Violation

Phase = Literal["startup", "run"]
FLAGS_OF = {
    "preemption": ("preemption-mode", "swap-space", "kv-offloading-size", "kv-offloading-backend"),
    "enable-prefix-caching": ("no-enable-prefix-caching",),
    "enable-chunked-prefill": ("no-enable-chunked-prefill",),
}
"""Knobs whose flags bear other names than the knob."""

FREE_SHARE = 0.95
"""A card with so much of its memory free is in nobody's use: driver and context take the rest."""

NEVER_RAN = frozenset({125, 126, 127})
"""Exit codes of a shell or a container runtime that could not start the program at all."""

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

    A refused argument stands first (exit code 2), then a root cause that lies with model, weights, driver or
    build. Else the first root cause in the log wins over later ones, any root cause over general errors,
    these over wrappers; where none is known the root cause's own line is told. A refusal is the candidate's
    fault only when it names a knob of the candidate. `held_gib` of GPU memory were in use before anything of
    ours ran: who asks for what was free then asks for too much.
    """
    refused = _refusal(text) if exit_code == 2 and phase == "startup" else ""
    if refused:
        return _blame(verdict("bad_flag", detail=_detail("bad_flag", refused), evidence=refused), list(asked))
    told = root_cause(text) or _shell_words(text)
    kind = None if told is None else study_kind(told.words)
    if exit_code in NEVER_RAN and phase == "startup":
        kind, told = kind or "image", told or RootCause(line=_exit_words(exit_code), words="")
    if told is not None and kind is not None:
        return verdict(kind, detail=told.line, evidence=told.line, phase=phase)
    found = first_cause(text)
    if found is not None and KINDS[found[0]].rank < 3:
        kind, line = found
        if kind == "gpu_busy" and _asks_too_much(line, held_gib):
            kind = "oom"
        return _blame(verdict(kind, detail=_detail(kind, line), evidence=line, phase=phase), list(asked))
    return _unknown(text, exit_code, phase, found, told, oom_killed=oom_killed)


def _unknown(
    text: str,
    exit_code: int | None,
    phase: Phase,
    found: tuple[str, str] | None,
    told: RootCause | None,
    *,
    oom_killed: bool,
) -> Verdict:
    """The verdict where the log names no known cause: the kernel's, or the root cause as it stands."""
    if oom_killed and (exit_code == -9 or found is not None):
        return verdict("host_oom", evidence=last_line(text), phase=phase)
    if exit_code == -9:
        return verdict("killed", evidence=last_line(text), phase=phase)
    own = None if told is None or _general(told.line) else told.line
    if found is not None and (found[0] != "hang" or exit_code is None):  # also said of slow compiles
        detail = own or _worker_words(text) or _exit_words(exit_code)
        return verdict(found[0], detail=detail, evidence=own or found[1], phase=phase)
    return verdict(
        "crashed", detail=own or _exit_words(exit_code), evidence=own or last_line(text), phase=phase
    )


def _general(line: str) -> bool:
    """Whether a line only says that the engine ended, which its kind says already."""
    return any(KINDS[kind].rank >= 3 and pattern.search(line) for kind, pattern in _COMPILED)


def study_kind(words: str) -> str | None:
    """Which fault of model, weights, driver or build an exception's words tell; None: none of them."""
    return next((kind for kind, pattern in _STUDY if pattern.search(words)), None)


def first_cause(text: str) -> tuple[str, str] | None:
    """(kind, line) of the earliest line of the best rank, None when nothing known is said."""
    best: tuple[int, str, str] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not _ANY.search(line) or re.search(r"\braise \w.*\($", line):
            continue
        quiet = split(line)[0].quiet
        kind = next((k for k, p in _COMPILED if p.search(line) and (KINDS[k].warned or not quiet)), None)
        if kind is not None and (best is None or KINDS[kind].rank < best[0]):
            if line.endswith("Config"):  # a validation error says what is wrong on its next lines
                line = " ".join([line, *(more.strip() for more in lines[number + 1 : number + 3])])
            best = (KINDS[kind].rank, kind, line.strip()[:500])
            if best[0] == 0:
                break
    return None if best is None else (best[1], best[2])


def _shell_words(text: str) -> RootCause | None:
    """The last line where no exception is told: what an interpreter, a shell or a container runtime says."""
    last = last_line(text)
    return None if not last or split(last)[0].quiet or _ANY.search(last) else RootCause(line=last, words=last)


def _refusal(text: str) -> str:
    """What argparse says, with the lines that belong to it; empty where it says nothing."""
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if re.search(r"^[^\s:][^:]*: error: ", line)]
    if not at:
        return ""
    more = [line.strip() for line in lines[at[-1] + 1 : at[-1] + 3] if line.startswith(" ")]
    return re.sub(r"\s*\[type=\w+, .*$", "", " ".join([lines[at[-1]].strip(), *more]))[:500]


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
    if kind in ("bad_flag", "block_size", "config_invalid", "max_len_gt_model"):
        words = re.sub(r"^.*?(?=error: |\w*Error\b|validation error)", "", line)
        return words[:240]
    if match := _MAMBA.search(line):
        return f"{match.group(1)} asked for, {match.group(2)} there"
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
_STUDY = [(kind, re.compile(about.pattern)) for kind, about in STUDY_KINDS.items()]
_COMPILED = [
    (kind, re.compile(about.pattern))
    for kind, about in KINDS.items()
    if about.pattern and kind not in STUDY_KINDS
]
_ANY = re.compile("|".join(pattern.pattern for _, pattern in _COMPILED))
