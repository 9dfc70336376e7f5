"""The errors of the tuner, one class per reaction of the caller. The sentence of each says what to do."""

import copyreg
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from tuner import masking
from tuner.records import Violation

# Exit code of a run that was stopped by a signal and can be resumed.
INTERRUPTED = 8

EXIT_CODES: Mapping[int, str] = MappingProxyType(
    {
        0: "done. Also the code of `serve` after SIGTERM or Ctrl-C, and of `tune` after `tuner run cancel`",
        1: "an engine failed, or there was an error that has no code in this list. `lint`: a finding is as"
        " severe as `--fail-on`",
        2: "wrong input. Fix the file, key or flag that the message names. Nothing was written",
        3: "`profile resolve --exit-code`: the file is unchanged",
        4: "not found",
        5: "conflict: another process is tuning this study, a promotion gate failed, or the port of `serve`"
        " is taken",
        6: "something outside failed (database locked, disk full). Try again; a run is then resumed",
        7: "no candidate of this study can work (model, weights, driver, image, a fixed argument). The"
        " message is the root cause from the engine's log",
        8: "stopped by a signal; the same command continues",
        9: "`schedule run`: a due run was refused (missed, overlap, too short). The message says why",
        22: "`compare --fail-if worse:…`: an arm is worse by more than the limit, or did not serve",
        23: "`compare --fail-if open`: a difference is still open",
    }
)
"""What each exit code means, but for those of `tuner doctor`, which are in tuner/doctor.py."""


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


def page_of(symptom: str | None) -> str:
    """The part of the documentation on a failure kind or a check of `tuner doctor` (`doctor-disk`), in
    brackets. Empty without a symptom.
    """
    return f" (docs/troubleshooting.md#{symptom.replace(' ', '-')})" if symptom else ""


LONGEST_NAME = 200
"""Characters beyond which no name is compared with others: the time grows with the length."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" when a known name is close, otherwise an empty string."""
    if len(name) > LONGEST_NAME:
        return ""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""
