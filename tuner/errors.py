"""Errors, named by what the one who catches them does. Each carries one sentence that says what to mend."""

from collections.abc import Iterable
from difflib import get_close_matches

from tuner import masking
from tuner.records import Violation

INTERRUPTED = 8
"""Exit code of a run that was stopped by a signal and can be resumed."""


class TunerError(Exception):
    """The root: anything the tuner says on purpose. `exit_code` is what the command line ends with.

    Secrets are taken out of the sentence.
    """

    exit_code = 1

    def __init__(self, reason: str = "") -> None:
        super().__init__(" ".join(masking.text(reason).splitlines()))


class BadInput(TunerError):
    """The request is wrong: mend the file, key or flag that the sentence names."""

    exit_code = 2


class NotFound(TunerError):
    """What was asked for does not exist."""

    exit_code = 4


class Conflict(TunerError):
    """The state forbids it: somebody else holds it, or it changed in between."""

    exit_code = 5


class Unavailable(TunerError):
    """Something outside failed (database locked, disk full): nothing was decided, try again."""

    exit_code = 6


class UnsupportedKnob(BadInput):
    """A knob that the installed engine does not have, with the nearest thing that it does have."""


class EngineError(TunerError):
    """An engine launch or replay that ended badly. `cause` is the verdict's kind, `evidence` a log line."""

    def __init__(self, reason: str, *, cause: str, evidence: str = "") -> None:
        super().__init__(reason)
        self.cause = cause
        self.evidence = evidence


class Infeasible(EngineError):
    """The candidate is at fault: record it, tell the search, go on."""

    def __init__(
        self, reason: str, *, cause: str, evidence: str = "", violation: Violation | None = None
    ) -> None:
        super().__init__(reason, cause=cause, evidence=evidence)
        self.violation = violation or Violation()


class Aborted(EngineError):
    """The world is at fault: retry the same attempt within limits, never tell the search."""


class StudyFailed(EngineError):
    """No candidate can work (model missing, a fixed argument refused): stop the run with the reason."""

    exit_code = 7


def nearest(name: str, known: Iterable[str]) -> str:
    """« (did you mean 'x'?)» when something known is close to the name, else an empty string."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""
