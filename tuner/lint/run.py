"""`tuner lint` from end to end: every engine of the input, all findings, and what could not be computed.
Also writes the findings as SARIF 2.1.0, which code scanning of GitHub, GitLab and Azure DevOps reads.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import __version__
from tuner.errors import BadInput
from tuner.knobs.catalogue import parse_version, table
from tuner.knobs.discover import GpuKind
from tuner.lint import flags
from tuner.lint.findings import RULES, Finding, found, in_order
from tuner.lint.subject import EngineToLint, LintSubject, facts_for, shape_of, unlike
from tuner.records import EngineFacts, Slo, Value

if TYPE_CHECKING:
    from tuner.history.store import Store
    from tuner.lint.load import StepTimeBasis
    from tuner.lint.memory import EngineFit
    from tuner.simulator.cost import Card
    from tuner.traffic.trace import Trace

SPACE = "bursty-mixed"
"""The shipped space whose best prediction is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintOptions:
    """What engines are linted against. `version` is a release; None: the one in the image's tag, else the
    newest known. Without a card or traffic the findings that need them are not computed.
    """

    version: str | None = None
    card: str | None = None
    gpus: int | None = None
    trace: "Trace | None" = None
    about: str = ""
    slo: Slo = field(default_factory=Slo)
    config: Path | None = None
    store: "Store | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LintedEngine:
    """One engine with its findings, worst first. `missing`: kind of finding → why it was not computed;
    `unread`: what the input does not give.
    `predicted` are the simulated numbers; `basis` says how far they are to be believed.
    """

    name: str
    where: str
    model: str | None
    version: str
    findings: tuple[Finding, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    kv_tokens: int | None = None
    traffic: str = ""
    basis: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    effective: Mapping[str, Value] = field(default_factory=dict)


def lint(engine: EngineToLint, against: LintOptions, env: Mapping[str, str]) -> LintedEngine:
    """All that can be said of one engine. BadInput for a card or a release that is none."""
    card = _card(against.card)
    gpu = GpuKind(name=card.title, memory_gib=card.memory_gib) if card and card.platform == "cuda" else None
    platform = card.platform if card else "cuda"
    facts = facts_for(against.version or engine.version, gpu, platform)
    unread = _notes(engine, facts)
    imported, findings = flags.check(engine.source, facts, unread)
    imported = replace(imported, model=imported.model or engine.source.model)
    if engine.effective:
        imported = replace(imported, candidate=engine.effective)
    shape, why = shape_of(imported.model, against.config, env)
    old, new = _releases(engine, against, gpu, platform)
    subject = LintSubject(
        source=engine.source,
        imported=imported,
        facts=facts,
        old=old,
        shape=shape,
        shapeless=why,
        live=engine.live,
    )
    length = subject.max_model_len or (shape.longest if shape else None)
    if not engine.effective:
        findings += list(flags.exclusions(imported, facts, length))
        findings += list(flags.moved_defaults(imported, old, new))
    base = LintedEngine(
        name=engine.source.name,
        where=engine.source.where,
        model=imported.model,
        version=facts.version,
        findings=(),
        unread=tuple(dict.fromkeys(unread)),
    )
    return _with_memory(base, subject, card, against, findings)


def _notes(engine: EngineToLint, facts: EngineFacts) -> list[str]:
    """What the place where the engine was found does not give, and a release that is not known yet."""
    unread = list(engine.source.notes)
    if parse_version(facts.version) > parse_version(table().versions[-1]):
        unread.append(
            f"vLLM {facts.version} is not known yet, so lint uses the flags of {table().versions[-1]}"
        )
    return unread


def _releases(
    engine: EngineToLint, against: LintOptions, gpu: GpuKind | None, platform: str
) -> tuple[EngineFacts, ...]:
    """The release that runs, and the one that its defaults are held against."""
    newest = table().versions[-1]
    runs = engine.version or against.version or newest
    other = against.version or newest
    if parse_version(other) < parse_version(runs) or parse_version(other) == parse_version(runs):
        other = newest
    return facts_for(runs, gpu, platform), facts_for(other, gpu, platform)


def _card(name: str | None) -> "Card | None":
    if name is None:
        return None
    from tuner.simulator.cost import CARDS, card_of

    meant = [each for each in CARDS if name.lower() in (each, each.partition("-")[0])]  # a100 has two
    return card_of(meant[0] if len(meant) == 1 else name)


def _with_memory(
    base: LintedEngine,
    subject: LintSubject,
    card: "Card | None",
    against: LintOptions,
    findings: list[Finding],
) -> LintedEngine:
    """Findings on layout and memory, then on traffic, as far as they can be computed."""
    from tuner.lint import memory

    findings += memory.layout(subject, against.gpus)
    findings += memory.length_over(subject)
    missing = (
        {"defaults": "a running server does not say which settings were written"} if subject.live else {}
    )
    why = "no --card is given" if card is None else unlike(subject)
    if why or card is None or subject.shape is None:
        missing |= {"fit": why, "traffic": why, "SLO": why}
        return replace(base, findings=in_order(findings), missing=missing)
    ranks = memory.size(subject, "tensor_parallel_size")
    from tuner.simulator.predict import Scene
    from tuner.traffic.trace import build

    empty = build({"arrival_s": [], "input_len": [], "output_len": []})
    scene = Scene(
        trace=empty,
        slices=(),
        facts=memory.shaped(subject, subject.shape),
        card=memory.card_for(card, subject),
        env=subject.imported.env,
        gpus=max(ranks, against.gpus or 1),
    )
    fit = memory.fit_of(subject, scene)
    if isinstance(fit, str):
        missing |= {
            kind: f"the engine refuses this configuration: {fit}" for kind in ("fit", "traffic", "SLO")
        }
        if not any(each.severity == "error" for each in findings):
            findings.append(found("flag-contradiction", fit, "the rules of vLLM's configuration"))
        return replace(base, findings=in_order(findings), missing=missing)
    findings += memory.check(subject, fit, against.trace)
    base = replace(base, kv_tokens=fit.tokens)
    stops = {"weights-do-not-fit", "no-kv-memory"} & {each.id for each in findings}
    if against.trace is None or stops:
        why = "the engine does not come up" if stops else "there is no --trace and no --rate"
        missing |= {"traffic": why, "SLO": why}
        return replace(base, findings=in_order(findings), missing=missing)
    return _with_traffic(base, subject, fit, against, against.trace, (findings, missing))


def _with_traffic(
    base: LintedEngine,
    subject: LintSubject,
    fit: "EngineFit",
    against: LintOptions,
    whole: "Trace",
    so_far: tuple[list[Finding], dict[str, str]],
) -> LintedEngine:
    from tuner.knobs import space as spaces
    from tuner.lint import load, memory
    from tuner.lint.load import dealt

    findings, missing = so_far
    basis = basis_of(subject, fit.scene.card, against.store)
    trace = dealt(whole, memory.size(subject, "data_parallel_size"))
    simulation = load.TrafficSimulation(fit, trace, against.slo, basis)
    findings += load.check(subject, simulation)
    findings += load.replicas(subject, simulation, whole)
    try:
        space = spaces.load(SPACE).restricted(subject.facts)
        best = load.best_of(subject, simulation, space)
    except BadInput as error:
        best = None
        missing |= {"SLO": str(error)}
    findings += load.attainment(simulation, best)
    if not len(trace.blocks):
        missing |= {"prefix cache": "the trace has no block ids, so it is not known which prompts repeat"}
    return replace(
        base,
        findings=in_order(findings),
        missing=missing,
        traffic=against.about,
        basis=basis.about,
        predicted=simulation.values,
    )


def basis_of(subject: LintSubject, card: "Card", store: "Store | None") -> "StepTimeBasis":
    """Step times as the last calibrated run of this model on this card has them, else by its datasheet."""
    from tuner.lint.load import StepTimeBasis
    from tuner.simulator.cost import coefficients_of, preset
    from tuner.simulator.predict import UNCALIBRATED

    model = subject.imported.model
    studies = store.studies(model=model) if store is not None and model else ()
    for study in studies:
        if store is None or not _is_of(study.gpu_class, card):
            continue
        for run in store.runs(study.id):
            kept = run.summary.get("calibration")
            coefficients = coefficients_of(kept.get("coefficients")) if isinstance(kept, dict) else None
            error = kept.get("error") if isinstance(kept, dict) else None
            if coefficients is not None and isinstance(error, int | float):
                about = f"calibrated on study {study.name}: step times within about {error:.0%}"
                return StepTimeBasis(coefficients=coefficients, error=float(error), about=about)
    return StepTimeBasis(coefficients=preset(card), error=UNCALIBRATED, about=UNCALIBRATED_SAYS)


def _is_of(gpu_class: str, card: "Card") -> bool:
    """Whether a node's class is of this card; a simulated card is none."""
    slug = re.sub(r"[^a-z0-9]+", "-", card.title.lower().removeprefix("nvidia ")).strip("-")
    return gpu_class == slug or re.fullmatch(rf"{re.escape(slug)}(-\d+)?x\d+", gpu_class) is not None


UNCALIBRATED_SAYS = (
    "uncalibrated: on 95 measurements on H100 and H200, the error of p95 E2E was 3 % "
    "in the median and 12 % at worst"
)
"""docs/simulator.md, « Uncalibrated »."""


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_document(linted: Sequence[LintedEngine]) -> dict[str, Any]:
    """One run with all rules and every finding; a finding of a file stands at the line with its flag."""
    order = list(RULES)
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.why},
            "help": {"text": rule.fix},
            "defaultConfiguration": {"level": rule.severity},
        }
        for rule in RULES.values()
    ]
    results = [
        _result(each, finding, order.index(finding.id)) for each in linted for finding in each.findings
    ]
    driver = {"name": "tuner lint", "version": __version__, "rules": rules}
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _result(one: LintedEngine, finding: Finding, place: int) -> dict[str, Any]:
    fix = f" Fix: {finding.fix}." if finding.fix else ""
    result: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": place,
        "level": finding.severity,
        "message": {"text": f"{one.name}: {finding.sentence}.{fix} ({finding.evidence})"},
    }
    path = Path(one.where)
    if path.is_file():
        region = {"startLine": _line_of(path, finding.flag)}
        where = {"artifactLocation": {"uri": path.as_posix()}, "region": region}
        result["locations"] = [{"physicalLocation": where}]
    return result


def _line_of(path: Path, flag: str) -> int:
    """The first line with the flag, in dashes, underscores or the chart's camelCase; else the first."""
    words = flag.lstrip("-").split("-")
    camel = words[0] + "".join(word.capitalize() for word in words[1:])
    spelled = [flag.lstrip("-"), "_".join(words), camel] if flag else []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((n for n, line in enumerate(lines, 1) if any(each in line for each in spelled)), 1)
