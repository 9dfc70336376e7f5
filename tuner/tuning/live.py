"""One running engine that measures several trials in turn: its scheduler's limits change between replays.

The engine of a trial stays and screens other candidates that differ only in limits. If none fits, an engine
is launched whose two sizes that limits cannot exceed are as large as the space allows. A candidate that fails
here is measured again in an engine of its own.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from tuner import masking
from tuner.adapters import adapter_of
from tuner.engine import limits
from tuner.engine.failures import KINDS
from tuner.engine.server import Server, serve
from tuner.errors import Aborted, EngineError, Infeasible, StudyFailed
from tuner.records import Candidate, Launch, Trial, Value
from tuner.search.encoding import encode
from tuner.tuning.context import LaunchJob, LaunchResult, Pass, RunContext, Serving, held, largest_kv
from tuner.tuning.study import Prepared
from tuner.tuning.trial import LaunchRecorder, add_launch, launch_spec, launched, make, measured_pass

SCHEDULER = "--scheduler-cls"

# Limits that may only be lowered in a running engine: buffers are as large as they were at its launch.
SIZES = ("max_num_seqs", "max_num_batched_tokens")


# After this many failures of running engines in a row every candidate gets an engine of its own: each failure
# cost a launch.
FAILURES = 3


class CannotScreen(Exception):
    """This candidate needs an engine of its own; the message is the reason, `cause` what ended the running
    engine.
    """

    def __init__(self, reason: str, cause: str | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


def changeable(prepared: Prepared) -> bool:
    """Whether the study asks for live limits, turns any, and its engine takes a scheduler class."""
    turned = any(name in prepared.space.levels for name in adapter_of(prepared.facts.kind).live_knobs)
    asked = prepared.file.live_limits == "auto"
    return asked and turned and SCHEDULER in prepared.facts.flags


def widest(prepared: Prepared, candidate: Candidate) -> tuple[Candidate, ...]:
    """What to launch so that the candidate and as much else as possible can be screened: the sizes of the
    space's last levels, every other limit as the engine has it. The widest first, known failures left out.
    """
    tops = {
        name: max(v for v in levels if isinstance(v, int))
        for name in SIZES
        if (levels := prepared.space.levels.get(name)) and any(isinstance(v, int) for v in levels)
    }
    kept = {
        name: value
        for name, value in candidate.items()
        if name not in adapter_of(prepared.facts.kind).live_knobs
    }
    asked = {name: candidate[name] for name in SIZES if name in candidate}
    found: list[Candidate] = []
    for sizes in (tops, {**tops, **{n: v for n, v in asked.items() if n != "max_num_seqs"}}):
        wide = Candidate({**kept, **sizes, **prepared.space.inherited})
        if prepared.known_failure(wide) is None and wide not in found:
            found.append(wide)
    return tuple(found)


def fits(
    prepared: Prepared, launched: Candidate, candidate: Candidate, defaults: Mapping[str, Value]
) -> dict[str, Value] | None:
    """The limits that turn a running engine into the candidate; None where that is not enough."""
    encoding = encode(prepared.space, defaults)
    knobs = adapter_of(prepared.facts.kind).live_knobs
    return limits.changeable(encoding.completed(launched), encoding.completed(candidate), knobs)


class ScreeningEngine:
    """The running engine that screens the candidates of a run, one after the other; none before the first
    trial.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._stack = AsyncExitStack()
        self._server: Server | None = None
        self._row: LaunchRecorder | None = None
        self._launched: Candidate = Candidate()
        self._charged_s = 0.0
        self._in_a_row = 0
        self._served = False
        self.failures: list[str] = []

    @property
    def possible(self) -> bool:
        """Whether this study's engines can be changed while they run, as far as is known by now."""
        here = self._context.work is None and self._in_a_row < FAILURES
        return here and changeable(self._context.prepared)

    async def measure(
        self,
        trial: Trial,
        passes: Sequence[Pass],
        directory: Path,
        defaults: Mapping[str, Value],
        *,
        own: bool = False,
    ) -> LaunchResult:
        """Measure a candidate inside the running engine; launch a wide one if none fits. With `own`, launch
        one for this candidate, which stays to screen others.

        CannotScreen if it needs an engine of its own; else as `launch`. An engine that ends while it screens
        is Aborted: only a launch of its own shows whose fault that was.
        """
        if not self.possible:
            raise CannotScreen("live limits are off")
        make(directory)
        begun = time.monotonic()
        wanted = None if own else self._limits(trial.candidate, defaults)
        if wanted is None:
            await self.close()
            self._charged_s = begun
            await self._launch(trial, own)
            wanted = {} if own else self._limits(trial.candidate, defaults)
        if wanted is None or self._server is None or self._row is None:
            raise CannotScreen("its sizes are beyond the running engine's")
        try:
            return await self._replay(self._server, self._row, trial, passes, directory, wanted)
        except Infeasible as error:
            await self.close(f"{error.cause}: {error}")
            raise Aborted(
                f"in a running engine: {error}", cause=error.cause, evidence=error.evidence
            ) from error
        except EngineError as error:
            if error.cause not in ("gate", "disk"):
                await self.close(f"{error.cause}: {error}")
            raise

    async def _replay(
        self,
        server: Server,
        row: LaunchRecorder,
        trial: Trial,
        passes: Sequence[Pass],
        directory: Path,
        wanted: Mapping[str, Value],
    ) -> LaunchResult:
        row.trial = trial
        if not await limits.change(server, wanted):
            said = await limits.ask(server, {})
            reason = f"the running engine did not take the limits: {said.error or 'no reason given'}"
            await self._give_up(reason)
            raise CannotScreen(reason)
        job = LaunchJob(
            spec=replace(server.spec, directory=str(directory)), passes=tuple(passes), number=trial.number,
            kv_tokens=largest_kv(self._context.launches()),
        )  # fmt: skip
        try:
            measured = [await measured_pass(self._context.host, job, p, server, row.note) for p in passes]
            self._in_a_row = 0
        finally:
            begun, self._charged_s = self._charged_s, time.monotonic()
        ended = replace(row.row, effective={**row.row.effective, **_shown(wanted)})
        return launched(
            ended, measured, (self._charged_s - begun) * held(self._context.prepared, server.spec.argv)
        )

    def _limits(self, candidate: Candidate, defaults: Mapping[str, Value]) -> dict[str, Value] | None:
        """What turns the running engine into the candidate; None where that is not enough."""
        if self._server is None or not self._server.alive:
            return None
        return fits(self._context.prepared, self._launched, candidate, defaults)

    async def _launch(self, trial: Trial, own: bool) -> None:
        """Launch the trial's own engine, or the widest that it can be screened in. CannotScreen when none
        comes up.
        """
        prepared, context = self._context.prepared, self._context
        directory = context.directory(trial.number, f"live-{trial.attempt}")
        known, launches = context.estimates(), context.launches()
        wider = (trial.candidate,) if own else widest(prepared, trial.candidate)
        specs = [(c, launch_spec(prepared, c, directory, context.cores, known=known)) for c in wider]
        wide, spec = next((each for each in specs if not _failed(launches, each[1].argv)), (None, None))
        if wide is None or spec is None:
            raise CannotScreen("no wider engine is known to work")
        make(directory)
        paths = spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        installed = limits.install(directory.resolve(), spec.launch_id, paths, spec.kind)
        spec = replace(spec, argv=(*spec.argv, *installed.argv), env={**spec.env, **installed.env})
        self._row = LaunchRecorder(context, add_launch(context, spec), trial)
        try:
            settle = context.settles(spec.argv) if own else False
            entered = serve(spec, gpus=context.gpus, settle=settle, note=self._row.note)
            server = await self._stack.enter_async_context(entered)
        except (Infeasible, StudyFailed) as error:
            if _certain(error, own=own) or (own and self._served and isinstance(error, Infeasible)):
                await self.close(f"{error.cause}: {error}")
                raise
            await self._give_up(f"{error.cause}: {error}")
            sentence = f"an engine whose limits can change failed: {error}"
            raise CannotScreen(sentence, error.cause) from error
        except EngineError as error:
            self._row.close(f"{error.cause}: {error}")
            self._row = None
            raise Aborted(str(error), cause=error.cause, evidence=error.evidence) from error
        except BaseException:
            self._row.close("stopped")
            self._row = None
            raise
        self._row.note(
            Serving(effective=server.effective, timeline=server.timeline, kv_tokens=server.kv_tokens)
        )
        self._server, self._launched, self._served = server, wide, True
        context.store.finish_launch(self._row.row)

    async def _give_up(self, reason: str) -> None:
        self._in_a_row += 1
        self.failures.append(reason)
        await self.close(reason)

    async def close(self, verdict: str | None = None) -> None:
        """Stop the running engine, if any, and close its row."""
        row, self._row, self._server = self._row, None, None
        stack, self._stack = self._stack, AsyncExitStack()
        try:
            await stack.aclose()
        finally:
            if row is not None:
                row.close(verdict)


def _certain(error: Infeasible | StudyFailed, *, own: bool) -> bool:
    """Whether the class that changes limits has nothing to do with it: a fault of the study, or, of the
    trial's own engine, one that a knob acts on.
    """
    words = f"{error} {error.evidence}".lower()
    if isinstance(error, StudyFailed):
        return "scheduler" not in words and "live_limits" not in words
    return own and error.cause in KINDS and bool(KINDS[error.cause].knobs) and error.cause != "v0_fallback"


def _failed(launches: Sequence[Launch], argv: Sequence[str]) -> bool:
    """Whether an engine of these arguments and with limits to change failed to start by its own fault."""
    for each in launches:
        kind = KINDS.get((each.verdict or "").partition(":")[0])
        ours = kind is not None and kind.outcome == "infeasible" and "ready_s" not in each.timeline
        changing = each.argv.index(SCHEDULER) if SCHEDULER in each.argv else None
        if ours and changing is not None and each.argv[:changing] == masking.arguments(argv):
            return True
    return False


def _shown(wanted: Mapping[str, Value]) -> dict[str, Value]:
    """The limits as effective values: they were read back after they were set."""
    return {name: value for name, value in wanted.items() if value is not None}
