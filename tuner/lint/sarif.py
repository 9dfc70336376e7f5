"""Findings as SARIF 2.1.0, which code scanning of GitHub, GitLab and Azure DevOps reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner import __version__
from tuner.lint.findings import RULES, Finding
from tuner.lint.run import LintedEngine

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def document(linted: Sequence[LintedEngine]) -> dict[str, Any]:
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
        region = {"startLine": _line(path, finding.flag)}
        where = {"artifactLocation": {"uri": path.as_posix()}, "region": region}
        result["locations"] = [{"physicalLocation": where}]
    return result


def _line(path: Path, flag: str) -> int:
    """The first line with the flag, in dashes, underscores or the chart's camelCase; else the first."""
    words = flag.lstrip("-").split("-")
    camel = words[0] + "".join(word.capitalize() for word in words[1:])
    spelled = [flag.lstrip("-"), "_".join(words), camel] if flag else []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((n for n, line in enumerate(lines, 1) if any(each in line for each in spelled)), 1)
