"""What `make docs` adds to mkdocs: the pages made from code, and a look at what a browser would load.

Links that leave docs/ (to code, raw results) become the path itself: the site has no copy of them.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from benchmarks.site.reference import pages

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
LOADED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*?\s(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)", re.I
)
FETCHED = re.compile(r"(?:@import|url\()\s*[\"'(]*((?:https?:)?//[^\"')\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the home page (the README) and the pages made from code."""
    files.append(File.generated(config, "index.md", content=home()))
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def home() -> str:
    """The README, seen from docs/."""
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", (ROOT / "README.md").read_text())
    return text.replace("](docs/", "](")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file of the project that is no page becomes that file's path."""
    here = (Path(config.docs_dir) / page.file.src_uri).parent
    return LINK.sub(lambda found: _link(found, here, files, page.file.src_uri), markdown)


def _link(found: re.Match[str], here: Path, files: Files, page: str) -> str:
    picture, words, target = found.groups()
    path = target.partition("#")[0]
    if picture or not path or re.match(r"[a-z]+:", path):
        return found[0]
    file = (here / path).resolve()
    docs = ROOT / "docs"
    if file.is_relative_to(docs) and (
        files.get_file_from_path(str(file.relative_to(docs))) or path.endswith(".md")
    ):
        return found[0]  # mkdocs checks it
    if not file.exists():
        raise PluginError(f"{page}: the link to {target} leads nowhere")
    return f"{words} (`{file.relative_to(ROOT)}`)" if words != str(file.relative_to(ROOT)) else f"`{words}`"


def on_post_build(config: Any) -> None:
    """PluginError when a page or a style sheet would load something over the network."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css"):
            pattern = LOADED if file.suffix == ".html" else FETCHED
            for address in pattern.findall(file.read_text(errors="replace")):
                raise PluginError(f"{file.relative_to(config.site_dir)} would load {address}")
