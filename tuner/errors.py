"""The errors of the tuner, one class per reaction of the caller. The sentence of each says what to do."""

import copyreg
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from tuner import masking
from tuner.records import Violation

# Exit code of a run that was stopped by a signal and can be resumed.
INTERRUPTED = 8


class TunerError(Exception):
    """The base class. `exit_code` is the exit code of the command line. Secrets in the sentence are
    masked.
    """

    exit_code = 1

    def __init__(self, reason: str = "") -> None:
        super().__init__(" ".join(masking.text(reason).splitlines()))

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        """Pickled with all attributes, whatever a subclass's constructor asks for: errors cross machines."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class BadInput(TunerError):
    """The request is wrong: correct the file, key or flag that the sentence names."""

    exit_code = 2


class NotFound(TunerError):
    """The thing that was asked for does not exist."""

    exit_code = 4


class Conflict(TunerError):
    """The state does not allow it: another holder has it, or it changed in the meantime."""

    exit_code = 5


class Unavailable(TunerError):
    """Something outside the tuner failed (database locked, disk full): nothing was changed, try again."""

    exit_code = 6


class UnsupportedKnob(BadInput):
    """The installed engine does not have a knob. The sentence names the nearest knob that it has."""


class EngineError(TunerError):
    """A launch or a replay failed. `cause` is the kind of failure, `evidence` the line of the log that shows
    it.
    """

    def __init__(self, reason: str, *, cause: str, evidence: str = "") -> None:
        super().__init__(reason)
        self.cause = cause
        self.evidence = evidence


class Infeasible(EngineError):
    """The candidate is at fault: record the trial, let the search learn from it, continue."""

    def __init__(
        self, reason: str, *, cause: str, evidence: str = "", violation: Violation | None = None
    ) -> None:
        super().__init__(reason, cause=cause, evidence=evidence)
        self.violation = violation or Violation()


class Aborted(EngineError):
    """The candidate is not at fault: repeat the trial within limits; the search ignores it."""


class StudyFailed(EngineError):
    """No candidate can work (model missing, a fixed argument refused): stop the run and give the reason."""

    exit_code = 7


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" when a known name is close, otherwise an empty string."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""
