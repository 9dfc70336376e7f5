"""The flags of one command line against one release: which it refuses, which do nothing, which exclude each
other. Nothing is launched: the shipped tables of flags, knobs and rules are all that is asked.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import yaml

from tuner.errors import BadInput, nearest
from tuner.knobs import arguments, baseline, catalogue, shell
from tuner.knobs.baseline import ALIASES, GONE, Imported
from tuner.knobs.catalogue import CATALOGUE, Knob, matches, negation, table
from tuner.knobs.engine_starts import FoundEngine
from tuner.lint.findings import Finding, found
from tuner.records import EngineFacts, Value
from tuner.settings import shipped

_AGAIN = frozenset(("--middleware", "--lora-modules", "--allowed-origins", "--served-model-name"))
"""Flags that may stand more than once."""
_SEVERAL = frozenset(
    f"--{name}"
    for name in (
        *(
            "allowed-media-domains",
            "api-key",
            "collect-detailed-traces",
            "cpu-offload-params",
            "offload-params",
        ),
        *("cudagraph-capture-sizes", "cuda-graph-sizes", "ignore-patterns", "kv-cache-dtype-skip-layers"),
        *("logits-processors", "lora-modules", "lora-target-modules", "numa-bind-cpus", "numa-bind-nodes"),
        *("served-model-name", "sleep-preserve-parameter-names", "middleware"),
    )
)
"""Flags that take several values, by the parsers of 0.10 to 0.33."""


_PARSER = "0.32.0"
"""The release whose parser gave _SEVERAL; how many values a flag takes that it lacks is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFlag:
    """A flag as it was written: its whole name in this release, its values, and how it was spelled."""

    flag: str
    values: tuple[str, ...]
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleFlag:
    """A flag that does nothing, in `versions`, `unless` one of these is given, or `when` one of them is."""

    flag: str
    why: str
    versions: str = ""
    unless: tuple[str, ...] = ()
    when: tuple[str, ...] = ()
    instead: str = ""


def _idle() -> tuple[IdleFlag, ...]:
    raw = yaml.load(
        shipped("lint", "idle.yaml").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return tuple(
        IdleFlag(
            flag=flag,
            why=entry["why"],
            versions=entry.get("versions", ""),
            unless=tuple(entry.get("unless", ())),
            when=tuple(entry.get("when", ())),
            instead=entry.get("instead", ""),
        )
        for entry in raw
        for flag in entry["flags"]
    )


def check(source: FoundEngine, facts: EngineFacts, unread: list[str]) -> tuple[Imported, list[Finding]]:
    """What the arguments set, as far as this release takes them, and what is wrong with them. What the text
    does not give, such as the value of a variable, is added to `unread`.
    """
    given, loose = _given(source, unread)
    findings = list(_by_source(source))
    kept: list[WrittenFlag] = []
    for each in given:
        exact, wrong = _name(each, facts)
        findings += [wrong] if wrong else []
        if exact:
            whole = replace(each, flag=exact)
            if (bad := _value(whole, facts)) is not None:
                findings.append(bad)
            else:
                kept.append(whole)
    for word in loose:
        fix = f"-{word}" if f"-{word}" in facts.flags else ""
        sentence = f"vLLM has no argument {word}"
        findings.append(
            found("flag-unknown", sentence, "it has one dash, and it is not a known short flag", fix)
        )
    findings += _repeated(kept)
    imported = _imported(source, kept, facts.version)
    findings += _effects(kept, imported, facts)
    return imported, findings


def _by_source(source: FoundEngine) -> Iterator[Finding]:
    """Words that vLLM gets otherwise than they were meant, and keys of Helm values that the chart does not
    read.
    """
    for sentence, fix in source.misread:
        yield found("flag-misread", sentence, "how the arguments are passed on", f"write {fix}")
    for note in source.notes:
        if (ignored := re.match(r"(\S+) is not a key that the chart reads", note)) is not None:
            sentence = f"{ignored[1]} does nothing: the chart does not read it"
            fix = f"write it under extraArgs in place of {ignored[1]}"
            yield found(
                "flag-ignored", sentence, "the chart's templates", fix, flag=ignored[1].split(".")[-1]
            )


def _given(source: FoundEngine, unread: list[str]) -> tuple[list[WrittenFlag], list[str]]:
    """The flags in order, and words that look like flags and are none. A lone model name becomes --model."""
    env = dict(source.env)
    added = shell.split(env.pop("VLLM_ADDITIONAL_ARGS", ""), source.where, by_shell=False)
    words = [shell.expanded(word, env) for word in (*source.words, *added)]
    head = [words.pop(0)] if words and not words[0].startswith("-") else []
    try:
        pairs = baseline.pairs(baseline.long_form(words), unread)
        before: list[str] = []
    except BadInput:
        start = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
        before = [word for word in words[:start] if re.match(r"-[A-Za-z]", word)]
        pairs = baseline.pairs(baseline.long_form(words[start:]), unread)
    if not head and not any(flag == "--model" for flag, _ in pairs):
        head = [last] if (last := baseline.model_at_the_end(pairs)) is not None else []
    loose = [*before, *(v for _, values in pairs for v in values if re.match(r"-[A-Za-z]", v))]
    given = [
        WrittenFlag(flag=flag, values=tuple(takewhile(lambda v: v not in loose, values)), written=flag)
        for flag, values in pairs
    ]
    named = [WrittenFlag(flag="--model", values=(head[0],), written=head[0])] if head else []
    return [*named, *given], loose


def _knob(flag: str) -> Knob | None:
    positive = _positive(flag)
    return next((k for k in CATALOGUE.values() if flag in k.flags or positive in k.flags), None)


def _positive(flag: str) -> str:
    return "--" + flag[5:] if flag.startswith("--no-") else flag


def _spans(flag: str) -> str:
    """« known since 0.25.1 » or « known from 0.6.3 to 0.17.1 »."""
    spans = table().flags.get(flag) or table().flags.get(_positive(flag), ())
    if not spans:
        return ""
    first, last = spans[0][0], spans[-1][1]
    return f"known from {first} to {last}" if last else f"known since {first}"


def _name(each: WrittenFlag, facts: EngineFacts) -> tuple[str | None, Finding | None]:
    """The flag that this release takes it for (None: it refuses it), and what is wrong with the name."""
    head, dot, rest = each.flag.partition(".")
    if head in facts.flags or head in ALIASES:
        return ALIASES.get(head, head) + dot + rest, None
    longer = sorted(name for name in facts.flags if name.startswith(head))
    if len(longer) == 1:
        sentence = f"{head} is short for {longer[0]}"
        wrong = found(
            "flag-abbreviated", sentence, "no other flag of this version begins with it", longer[0], flag=head
        )
        return longer[0] + dot + rest, wrong
    return None, _absent(head, facts)


def _absent(flag: str, facts: EngineFacts) -> Finding:
    version, known = facts.version, table()
    positive = _positive(flag)
    if flag not in known.flags and not (positive in known.flags and positive in known.paired):
        if positive in facts.flags and positive != flag:
            sentence = f"{flag}: {positive} has no --no- form in vLLM {version}"
            return found(
                "flag-unknown", sentence, "the parser's own list of flags", f"remove {flag}", flag=flag
            )
        close = nearest(flag, facts.flags)
        named = re.search(r"'(.+)'", close)
        sentence = f"no vLLM has {flag}{close}"
        fix = named[1] if named else f"remove {flag}"
        return found("flag-unknown", sentence, f"the flags of vLLM {version}", fix, flag=flag)
    span = _spans(flag)
    entry = _knob(flag)
    other = entry.flag_in(facts) if entry else None
    if other is not None:
        sentence = f"{flag} is called {other} in vLLM {version}"
        return found("flag-renamed", sentence, f"{flag}: {span}", other, flag=flag)
    spans = known.flags.get(flag) or known.flags[positive]
    newer = matches(spans[0][0], f">{known.floor(version)}")
    if newer:
        sentence = f"vLLM {version} does not have {flag} yet; it came with {spans[0][0]}"
        return found("flag-too-new", sentence, f"{flag}: {span}", f"remove {flag}", flag=flag)
    became = GONE.get(flag, "no replacement is known")
    sentence = f"vLLM {version} no longer has {flag}: {became}"
    return found("flag-removed", sentence, f"{flag}: {span}", f"remove {flag}", flag=flag)


def _value(each: WrittenFlag, facts: EngineFacts) -> Finding | None:
    """What is wrong with the value of a flag that this release has."""
    head = each.flag.partition(".")[0]
    if (wrong := baseline.switch_with_value(head, each.values, facts.version)) is not None:
        off = each.values[0].lower() in ("false", "0", "no") and not head.startswith("--no-")
        fix = negation(head) if off else head
        return found("flag-value", wrong, "vLLM's parser takes no value there", fix, flag=head)
    if any(shell.unknown(value) for value in each.values):
        return None
    needs = head in table().flags_of(_PARSER) and not baseline.is_switch(head) and head != "--hf-token"
    if not each.values and needs and "." not in each.flag:
        return found("flag-value", f"{head} has no value", "vLLM's parser: expected one argument", flag=head)
    if len(each.values) > 1 and head not in _SEVERAL and head in table().flags_of(_PARSER):
        more = " ".join(repr(value) if not value.strip() else value for value in each.values[1:])
        sentence = f"{head} takes one value, so vLLM reads {more} as separate arguments and refuses them"
        return found(
            "flag-value", sentence, "vLLM's parser: unrecognized arguments", f"remove {more}", flag=head
        )
    if "." not in each.flag and (bad := _misread_number(head, each.values)) is not None:
        return bad
    try:
        made = baseline.from_arguments(
            (each.flag, *each.values), env={}, source="", facts=replace(facts, flags=facts.flags | {head})
        )
    except BadInput as error:
        sentence = re.sub(r"^: |(?<=: )\w+: ", "", str(error))
        return found("flag-value", sentence, f"what vLLM {facts.version} takes", flag=head)
    for name, value in made.candidate.items():
        entry = CATALOGUE[name]
        complaint = entry.complaint(value, facts.version)
        if complaint is not None and entry.kind != "preemption":
            close = nearest(str(value), [str(v) for v in entry.choices_for(facts.version)])
            named = re.search(r"'(.+)'", close)
            fix = f"{each.flag} {named[1]}" if named else ""
            sentence = re.sub(r"^\w+", each.flag, complaint)
            return found("flag-value", sentence, f"what vLLM {facts.version} takes", fix, flag=head)
        refused = (entry.never or "").startswith("The V1 engine refuses")
        if refused and value != 1 and not matches(facts.version, entry.usable):
            sentence = f"{each.flag} {value}: {entry.never}"
            return found("flag-value", sentence, "vLLM's own refusal", f"remove {each.flag}", flag=head)
    return None


def _misread_number(flag: str, values: Sequence[str]) -> Finding | None:
    """A value that vLLM's parser does not take for a number, where it wants one."""
    entry = _knob(flag)
    kind = entry.kind if entry else ""
    if (wanted := catalogue.wanted_number(flag, kind)) is None:
        return None
    for text in values:
        try:
            catalogue.read_number(flag, kind, text)
        except ValueError:
            why = f"vLLM's parser: invalid {'int' if 'whole' in wanted else 'float'} value"
            return found("flag-value", f"{flag} takes {wanted}, and got {text or 'nothing'}", why, flag=flag)
    return None


def _repeated(given: Sequence[WrittenFlag]) -> Iterator[Finding]:
    seen: dict[str, list[WrittenFlag]] = {}
    for each in given:
        name = _positive(each.flag)
        if "." not in each.flag and name not in _AGAIN:
            seen.setdefault(name, []).append(each)
    for name, all_of_it in seen.items():
        if len(all_of_it) > 1:
            said = ", ".join(" ".join((each.flag, *each.values)) for each in all_of_it)
            last = " ".join((all_of_it[-1].flag, *all_of_it[-1].values))
            sentence = f"{name} is given {len(all_of_it)} times; the last one counts"
            yield found("flag-repeated", sentence, said, f"keep {last} and remove the rest", flag=name)


def _last(given: Sequence[WrittenFlag]) -> dict[str, WrittenFlag]:
    """The last of each flag; of a switch and its negation the later one."""
    last: dict[str, WrittenFlag] = {}
    for each in given:
        last.pop(_positive(each.flag), None)
        last.pop(negation(_positive(each.flag)), None)
        last[each.flag] = each
    return last


def _imported(source: FoundEngine, kept: Sequence[WrittenFlag], version: str) -> Imported:
    """The configuration by the last of each flag, whatever of it this release takes."""
    words = [word for each in _last(kept).values() for word in (each.flag, *each.values)]
    flags = frozenset(each.flag.partition(".")[0] for each in kept)
    facts = EngineFacts(kind="vllm", version=version, platform="cuda", flags=flags)
    return baseline.from_arguments(words, env=source.env, source=source.where, name=source.name, facts=facts)


def _effects(given: Sequence[WrittenFlag], imported: Imported, facts: EngineFacts) -> Iterator[Finding]:
    """Flags that this release reads without acting on them, that others turn off, or that say the default."""
    last = _last(given)
    silent: set[str] = set()
    pinned = imported.env.get("VLLM_USE_V1") == "0" and matches(facts.version, "<0.11")
    for rule in IDLE if not pinned else ():
        if rule.flag in last and matches(facts.version, rule.versions) and _holds(rule, last, imported):
            silent.add(rule.flag)
            yield _silent(rule, facts)
    for name, value in () if pinned else imported.candidate.items():
        entry = CATALOGUE[name]
        flag = next((f for f in reversed(last) if _knob(f.partition(".")[0]) is entry), None)
        if flag is None or flag in silent:
            continue
        if entry.platforms and facts.platform not in entry.platforms:
            sentence = f"{flag} has no effect on {facts.platform}, only on {', '.join(entry.platforms)}"
            yield found("flag-no-effect", sentence, entry.source, f"remove {flag}", flag=flag)
        elif not matches(facts.version, entry.usable) and not (entry.never or "").startswith("The V1 engine"):
            sentence = f"vLLM {facts.version} accepts {flag}, but it has no effect: {entry.never}"
            yield found("flag-no-effect", sentence, entry.source, f"remove {flag}", flag=flag)
        elif _is_default(name, value, imported, facts):
            said = flag if isinstance(value, bool) else f"{flag} {value}"
            sentence = f"{said} is the default of vLLM {facts.version}"
            yield found("flag-default", sentence, "the release's default on this device", flag=flag)


def _said(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_default(name: str, value: Value, imported: Imported, facts: EngineFacts) -> bool:
    """Whether a knob holds its default; settings that move another's default leave that open."""
    moved = imported.candidate.keys() & {"performance_mode", "optimization_level"} - {name}
    default = CATALOGUE[name].default_for(facts)
    return not moved and name != "preemption" and default is not None and value == default


def _holds(rule: IdleFlag, last: Mapping[str, WrittenFlag], imported: Imported) -> bool:
    """Whether nothing that wakes the flag is given, and something that silences it is."""
    on = {flag for flag in last if not _off(flag, imported)}
    if rule.unless and on & set(rule.unless):
        return False
    return not rule.when or bool(on & set(rule.when))


def _off(flag: str, imported: Imported) -> bool:
    """Whether a switch is given as false, or a size as 1 or 0: as good as not given."""
    entry = _knob(flag)
    value = imported.candidate.get(entry.name) if entry else imported.args.get(flag[2:])
    if flag.startswith("--no-"):
        return False
    return value is False or (value in (0, 1) and value is not True)


def _silent(rule: IdleFlag, facts: EngineFacts) -> Finding:
    instead = f"{rule.instead} in place of {rule.flag}" if rule.instead else f"remove {rule.flag}"
    if rule.unless or rule.when:
        return found(
            "flag-ignored", f"{rule.flag} does nothing: {rule.why}", "vLLM's source", instead, flag=rule.flag
        )
    sentence = f"vLLM {facts.version} accepts {rule.flag}, but it has no effect: {rule.why}"
    return found("flag-no-effect", sentence, "vLLM's source", instead, flag=rule.flag)


IDLE = _idle()


def exclusions(imported: Imported, facts: EngineFacts, max_model_len: int | None) -> Iterator[Finding]:
    """Settings that exclude or overrule each other."""
    knobs = imported.candidate
    layout = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    sized = [n for n in ("num_gpu_blocks_override", "kv_cache_memory_bytes") if n in knobs]
    over = ("gpu_memory_utilization", *sized[1:]) if sized else ()
    rest = {n: v for n, v in knobs.items() if n not in (*layout, *over)}
    for why in arguments.violations(rest, facts, max_model_len):
        yield found("flag-contradiction", why, "the rules of vLLM's configuration (vllm/config)")
    for name in over:
        if name in knobs:
            flag, by = CATALOGUE[name].flags[0], CATALOGUE[sized[0]].flags[0]
            sentence = f"{by} sets the KV cache's size, so {flag} does not"
            yield found("flag-overridden", sentence, f"{by} {knobs[sized[0]]}", f"remove {flag}", flag=flag)
    if imported.args.get("enable-auto-tool-choice") and "tool-call-parser" not in imported.args:
        yield found(
            "flag-contradiction",
            "--enable-auto-tool-choice needs --tool-call-parser",
            "vLLM's own check of its arguments",
            "--tool-call-parser hermes",
            flag="--enable-auto-tool-choice",
        )


def moved_defaults(imported: Imported, old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Defaults that the command line relies on and that differ between two releases."""
    for name, entry in CATALOGUE.items():
        before, after = entry.default_for(old), entry.default_for(new)
        both = entry.flag_in(old) is not None and entry.flag_in(new) is not None
        if name in imported.candidate or not both or before is None or after is None or before == after:
            continue
        if entry.acts_on(new.platform):
            flag = entry.flag_in(new)
            sentence = f"{name} is {_said(before)} in vLLM {old.version} and {_said(after)} in {new.version}"
            keep = f"{flag} {_said(before)}" if not isinstance(before, bool) else str(flag)
            keep = negation(str(flag)) if before is False else keep
            yield found("default-moved", sentence, entry.source, keep)
