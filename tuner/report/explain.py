"""Why a configuration won, in plain sentences: what each knob gives, and by which mechanism."""

from collections.abc import Iterator, Mapping

from tuner.conclusions import Attribution, Conclusion, KnobGain
from tuner.records import JSON
from tuner.replay.plan import PLANS
from tuner.report import words


def gave(found: Attribution | None) -> dict[str, str]:
    """Knob → its largest gain, in a few words, for the answer card; empty without an attribution."""
    return {gain.name: _gave(gain) for gain in found.knobs} if found is not None else {}


def _gave(gain: KnobGain) -> str:
    if not gain.kept:
        return "nothing, left out"
    told = [d for d in gain.gains if d.word != "open"]
    if not told:
        return gain.why or "not measured alone"
    most = max(told, key=lambda d: (d.word == "better", abs(d.change or 0.0)))
    return words.difference(most) + (", predicted" if gain.how == "predicted" else "")


def why_none(said: Conclusion | None, plan: JSON, *, begun: bool) -> str:
    """The reason why a run did not ask which knobs give the gain. `plan` is that of the study's file,
    `begun`: whether it had launched an engine for it.
    """
    if said is None:
        return "it ended without a conclusion"
    if said.winner is None:
        return f"nothing won ({words.outcome(said)})"
    if said.baseline is None:
        return "today's configuration was never measured, so there is no gain to attribute"
    if said.baseline.dropped is not None:
        return "today's configuration did not serve this traffic, so there is no gain to attribute"
    if said.demonstration:
        return "it was a demonstration"
    changed: dict[str, JSON] = plan if isinstance(plan, dict) else {"base": plan, "attribution": None}
    share = changed.get("attribution")
    known = PLANS.get(str(changed.get("base")))
    if share == 0 or (share is None and known is not None and known.attribution <= 0):
        return "its plan has attribution: 0"
    winner = said.arm(said.winner)
    if winner is not None and winner.candidate == said.baseline.candidate:
        return "the winner has the knobs of today's configuration"
    if begun:
        return "the launches for this were not finished"
    if "attribution" not in changed:
        return "an earlier release made this run and could not do this"
    return "it ended too early"


def lines(found: Attribution, *, gpus: bool) -> Iterator[str]:
    """The whole attribution: its sentence, then one line for each knob. `gpus`: its engines held GPUs."""
    yield found.sentence
    for gain in found.knobs:
        yield f"  {knob_line(gain)}"
    if found.last:
        compared = ", ".join(words.difference(d) for d in found.last if d.where == "confirm")
        yield f"the reduced configuration against the winner: {compared}"
    searched = found.search_s + found.earlier_search_s
    share = found.seconds / searched if searched else 0.0
    both = " and the earlier search together" if found.earlier_search_s else ""
    yield f"this took {words.took(found.seconds, gpus=gpus)}, {share:.0%} of the time of the search{both}"


def knob_line(gain: KnobGain) -> str:
    """`max_num_seqs 64: e2e_p95_ms −41 % (−45 … −37, better), measured; simulated: fewer requests wait …`."""
    told = [words.difference(d) for d in gain.gains if d.word != "open"]
    value = "not set" if gain.value is None else gain.value
    if not gain.kept:
        return f"{gain.name} {value}: no gain, left out ({gain.why})"
    parts = [", ".join(told) or "kept", *([gain.how] if told else []), *([gain.why] if gain.why else [])]
    because = f"; simulated: {gain.mechanism}" if gain.mechanism else ""
    return f"{gain.name} {value}: {', '.join(parts)}{because}"


def sentence_of(found: Attribution, why: str = "") -> str:
    """The attribution in one or two sentences."""
    pays = [g.name for g in found.knobs if g.kept and g.how != "not asked"]
    unasked = ", ".join(g.name for g in found.knobs if g.kept and g.how == "not asked")
    rest = f" Not tested: {unasked}." if unasked else ""
    left = [g.name for g in found.knobs if not g.kept]
    if found.published:
        return (
            f"{', '.join(pays) or 'No knob'} {'gives' if len(pays) < 2 else 'give'} the gain;"
            f" {', '.join(left)}"
            f" {'gives' if len(left) < 2 else 'give'} nothing and {'is' if len(left) < 2 else 'are'} left out"
            f" of the profile (trial {found.reduced}).{rest}"
        )
    if why:
        return f"The winner is published unchanged: {why}."
    if not pays:
        return f"The winner is published unchanged.{rest}"
    every = f"Every {'tested ' if unasked else ''}knob of the winner"
    return f"{every} gives a part of the gain: {', '.join(pays)}.{rest}"


def mechanism(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What the simulator sees change from `before` to `after` (measurement names), most telling first: queue,
    preemption, prefill interference, KV cache, host-bound steps; empty if it sees nothing.
    """
    said = [
        text
        for text in (
            _queue(before, after), _preemption(before, after), _prefill(before, after), _cache(before, after),
        )
        if text
    ]  # fmt: skip
    faster = _ratio(before, after, "tpot_p50_ms")
    if not said and faster is not None and abs(faster - 1) > 0.02:
        word = "less" if faster < 1 else "longer"
        said.append(f"each step has the same work, and steps wait {word} for the host")
    return "; ".join(said[:2])


def _ratio(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    a, b = before.get(name), after.get(name)
    return None if not a or b is None else b / a


def _queue(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    a, b = (v.get("queue_depth_mean", 0.0) for v in (before, after))
    if abs(a - b) < 0.1 or (a and 0.8 < b / a < 1.25):
        return ""
    word = "fewer" if b < a else "more"
    return f"{word} requests wait in the queue (on average {words.number(a)} → {words.number(b)})"


def _preemption(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    a, b = (v.get("preemptions", 0.0) for v in (before, after))
    return "" if abs(a - b) < 1 else f"preemptions {words.number(a)} → {words.number(b)}"


def _prefill(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    share = _ratio(before, after, "batch_tokens_mean")
    steps = _ratio(before, after, "tpot_p95_ms")
    if share is None or steps is None or 0.95 < steps < 1.05 or 0.9 < share < 1.1:
        return ""
    word = "disturb decoding less" if steps < 1 else "disturb decoding more"
    shown = " → ".join(words.number(v["batch_tokens_mean"]) for v in (before, after))
    return f"prefills {word} (tokens in a step, on average {shown})"


def _cache(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    a, b = (v.get("kv_usage_max", 0.0) for v in (before, after))
    return "" if abs(a - b) < 0.1 else f"the KV cache is filled to {b:.0%} at most instead of {a:.0%}"
