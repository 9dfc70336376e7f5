"""docs/lint/ from tuner/lint/rules.yaml: `python -m benchmarks.lint.pages docs/lint` writes it."""

import sys
from pathlib import Path

from tuner.lint.findings import RULES, LintRule


def pages() -> dict[str, str]:
    """File name → text: one page a rule, and the index."""
    return {"index.md": _index(), **{f"{rule.id}.md": _page(rule) for rule in RULES.values()}}


def _index() -> str:
    kinds = dict.fromkeys(rule.kind for rule in RULES.values())
    text = (Path(__file__).parent / "index.md").read_text()
    return text.replace("<!-- rules -->\n", "\n".join(_of_kind(kind) for kind in kinds))


def _of_kind(kind: str) -> str:
    rows = [
        f"| [{rule.id}]({rule.id}.md) | {rule.severity} | {rule.title} |"
        for rule in RULES.values()
        if rule.kind == kind
    ]
    heading = kind[0].upper() + kind[1:]
    return "\n".join((f"## {heading}", "", "| id | severity | what is wrong |", "|---|---|---|", *rows, ""))


def _page(rule: LintRule) -> str:
    return (
        f"# {rule.id}\n\n{rule.title}.\n\nSeverity: {rule.severity}. Kind: {rule.kind}.\n\n"
        f"## Why\n\n{rule.why}\n\n## What to do\n\n{rule.fix}\n\n[All findings](index.md)\n"
    )


def write(folder: Path) -> None:
    """Write every page, and remove those of rules that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
