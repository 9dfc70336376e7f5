"""The findings of `tuner lint` as records, and the table of all that there are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import yaml

from tuner.errors import BadInput, nearest
from tuner.settings import shipped

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule:
    """One row of rules.yaml."""

    id: str
    severity: Severity
    kind: str
    title: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result: `sentence` says what is wrong, `evidence` what it was computed from, `fix` the flags to
    write or take out (empty: none). `flag` is where it stands on the command line, if it does.
    """

    id: str
    severity: Severity
    sentence: str
    evidence: str
    fix: str = ""
    flag: str = ""

    @property
    def page(self) -> str:
        """Its page in the documentation."""
        return f"docs/lint/{self.id}.md"


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
RULES: Mapping[str, LintRule] = {
    name: LintRule(id=name, **entry)
    for name, entry in yaml.load(shipped("lint", "rules.yaml").read_text(), Loader=_LOADER).items()
}


def found(rule: str, sentence: str, evidence: str, fix: str = "", *, flag: str = "") -> Finding:
    """A finding of a rule, with the rule's severity."""
    return Finding(
        id=rule, severity=RULES[rule].severity, sentence=sentence, evidence=evidence, fix=fix, flag=flag
    )


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first, then as in the table."""
    rank = {name: place for place, name in enumerate(RULES)}
    return tuple(sorted(findings, key=lambda each: (SEVERITIES.index(each.severity), rank[each.id])))


def reaches(findings: Iterable[Finding], level: str) -> bool:
    """Whether one of them is as bad as `level` (error, warning or note) or worse; `never` is out of reach."""
    if level == "never":
        return False
    if level not in SEVERITIES:
        known = (*SEVERITIES, "never")
        raise BadInput(f"--fail-on {level}: give one of {', '.join(known)}{nearest(level, known)}")
    allowed = SEVERITIES[: SEVERITIES.index(level) + 1]
    return any(each.severity in allowed for each in findings)
