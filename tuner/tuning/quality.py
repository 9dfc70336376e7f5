"""Whether a candidate still answers as the baseline does: greedy canary prompts, token by token.

Measured only if the space turns knobs that change the output. A trial that turns one and was not judged is
never published, unless the study has `quality: off`. With dummy weights, or on the simulated engine, answers
mean nothing: the space then turns no such knob.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuner.engine.server import Server
from tuner.errors import Aborted
from tuner.knobs.catalogue import CATALOGUE
from tuner.measures import trials_named
from tuner.records import JSON, Candidate, Trial, TrialState
from tuner.tuning.study import Prepared

# Prompts, tokens of each, and tokens of each answer: 768 compared tokens, of which 1 % are eight.
CANARIES, PROMPT, ANSWER = 16, 64, 48

# Names of the comparison's numbers in a measurement.
AGREEMENT, DISTANCE = "token_agreement", "logprob_distance"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAnswer:
    """One greedy answer: its tokens as the engine writes them, and their log probabilities."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


def why_not(prepared: Prepared) -> str | None:
    """Why the study's quality is not judged, None when it can and must be."""
    turned = ", ".join(prepared.space.changes_output)
    if not turned:
        return "no knob of the space changes the output"
    if prepared.file.quality == "off":
        return f"not judged, as the study says (quality: off): {turned} may change the output"
    return None


def unjudged(prepared: Prepared, trial: Trial) -> tuple[str, ...]:
    """The knobs of a trial that change the output, if its answers were not compared with the baseline's."""
    if any(AGREEMENT in measured.values for measured in trial.measurements):
        return ()
    return changes(trial.candidate, prepared.baseline)


def held_back(prepared: Prepared, trial: Trial) -> str | None:
    """Why a trial may not be published: it turns a knob that changes the output, and its answers were not
    compared. None: it may."""
    turned = unjudged(prepared, trial)
    if not turned or prepared.file.quality == "off":
        return None
    return f"it changes {', '.join(turned)}, and its answers were not judged (quality: off allows this)"


def changes(candidate: Candidate, baseline: Candidate) -> tuple[str, ...]:
    """The knobs in which they differ and that change the output."""
    names = {n for n in {*candidate, *baseline} if n in CATALOGUE and CATALOGUE[n].changes_output}
    return tuple(sorted(n for n in names if candidate.get(n) != baseline.get(n)))


def canaries(vocabulary: int, seed: int) -> list[list[int]]:
    """The prompts, as token ids: the same for every candidate of a study."""
    rng = np.random.default_rng((seed, CANARIES))
    return [[int(t) for t in rng.integers(10, vocabulary, PROMPT)] for _ in range(CANARIES)]


async def answers(server: Server, prepared: Prepared) -> tuple[CanaryAnswer, ...]:
    """Ask an idle engine. Aborted (cause quality) when it does not answer with log probabilities."""
    found = []
    for prompt in canaries(prepared.model.vocab_size, prepared.study.seed):
        body: JSON = {
            "model": server.names[0], "prompt": list(prompt), "max_tokens": ANSWER, "temperature": 0.0,
            "ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True, "seed": 0,
        }  # fmt: skip
        try:
            reply = await server.ask("POST", "/v1/completions", body=body, timeout_s=120.0)
        except OSError as error:
            raise Aborted(f"no answer to a test prompt: {error}", cause="quality") from error
        found.append(parse(reply.json()))
    return tuple(found)


def parse(said: JSON) -> CanaryAnswer:
    """An answer from the JSON of a completion. Aborted (cause quality) for anything else."""
    try:
        logprobs = said["choices"][0]["logprobs"]  # type: ignore[index, call-overload]
        return CanaryAnswer(
            tokens=tuple(str(token) for token in logprobs["tokens"]),  # type: ignore[index, call-overload, union-attr]
            logprobs=tuple(float(value) for value in logprobs["token_logprobs"]),  # type: ignore
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Aborted(
            f"the engine's answer to a test prompt has no log probabilities: {error}", cause="quality"
        ) from error


def compared(base: Sequence[CanaryAnswer], other: Sequence[CanaryAnswer]) -> dict[str, float]:
    """(mean share of tokens that agree before the first that differs, mean distance of the log probabilities
    over them; 0 if none agrees).
    """
    shares, distances = [], list[float]()
    for mine, theirs in zip(base, other, strict=True):
        pairs = zip(mine.tokens, theirs.tokens, strict=False)
        same = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine.tokens), len(theirs.tokens))
        )
        shares.append(same / max(len(mine.tokens), len(theirs.tokens), 1))
        both = zip(mine.logprobs[:same], theirs.logprobs[:same], strict=True)
        distances += [abs(a - b) for a, b in both if math.isfinite(a) and math.isfinite(b)]
    return {AGREEMENT: float(np.mean(shares)), DISTANCE: float(np.mean(distances)) if distances else 0.0}


def path_of(home: Path, prepared: Prepared) -> Path:
    """The file of the baseline's answers."""
    return home / "trials" / prepared.study.id[:16] / "quality.json"


def keep(path: Path, found: Sequence[CanaryAnswer]) -> None:
    """Write answers."""
    path.write_text(json.dumps([[list(a.tokens), list(a.logprobs)] for a in found]), encoding="utf-8")


def kept(path: Path) -> tuple[CanaryAnswer, ...]:
    """The stored answers; empty without a file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple(CanaryAnswer(tokens=tuple(tokens), logprobs=tuple(logprobs)) for tokens, logprobs in raw)


def summary(prepared: Prepared, trials: Sequence[Trial]) -> str:
    """The summary's sentence about the quality of the answers."""
    if (reason := why_not(prepared)) is not None:
        return reason
    done = [t for t in trials if t.state is TrialState.COMPLETE]
    left = [t.label for t in done if held_back(prepared, t)]
    if left:
        return f"not judged, so not published: {trials_named(left)} (the baseline gave no answers)"
    return "judged by the answers to greedy test prompts"


def verdict(values: Mapping[str, float], least: float, turned: Sequence[str]) -> str | None:
    """Why a candidate is refused, or None."""
    if values[AGREEMENT] >= least:
        return None
    return (
        f"its answers agree with the baseline's in {values[AGREEMENT]:.1%} of the tokens, but"
        f" {least:.1%} are required ({', '.join(turned)})"
    )
