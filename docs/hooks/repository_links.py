"""Files of the repository as pages of the site, and links to them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_TEXTS = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples/index.md",
    "packaging/README.md": "packages.md",
}


def texts(root: Path) -> dict[str, str]:
    """Return the Markdown pages outside ``docs``: path in the repository → path in the sources."""
    return {source: page for source, page in _TEXTS.items() if (root / source).is_file()}


def programs(root: Path) -> dict[str, str]:
    """Return the example programs: path in the repository → path of their page."""
    return {
        f"examples/{path.name}": f"examples/{path.stem}.md"
        for path in sorted((root / "examples").glob("*.py"))
    }


def results(root: Path) -> dict[str, str]:
    """Return the records and plots of benchmarks: path in the repository → path in the site."""
    folder = root / "benchmarks" / "results"
    return {
        f"benchmarks/results/{path.name}": f"figures/{path.name}"
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def named(path: Path, programs: Mapping[str, str]) -> str:
    """Return a text with links for programs at the start of table rows.

    The text of the examples lists all programs.
    """
    text = path.read_text(encoding="utf-8")
    if path.parent.name != "examples":
        return text
    names = [Path(source).name for source in programs]
    text = re.sub(
        r"^\| `(\w+\.py)` \|",
        lambda row: f"| [`{row[1]}`]({row[1]}) |" if row[1] in names else row[0],
        text,
        flags=re.M,
    )
    return "\n".join(
        [
            text,
            "## All programs, and what they share",
            "",
            *(f"- [{name}]({name})" for name in names),
            "",
        ]
    )


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to all text outside fenced blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def rebased(markdown: str, source: str, target: str) -> str:
    """Return a text of ``source`` with relative links adapted to the file ``target``."""

    def change(match: re.Match[str]) -> str:
        path, _, anchor = match["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match.group()
        whole = posixpath.join(posixpath.dirname(source), path)
        place = posixpath.relpath(whole, posixpath.dirname(target) or ".")
        return f"{match['image']}[{match['text']}]({place}{'#' + anchor if anchor else ''})"

    return outside_fences(markdown, lambda part: _LINK.sub(change, part))


def rewrite(markdown: str, source: str, page: str, site: Mapping[str, str], root: Path) -> str:
    """Replace the relative links of a text by links within the site.

    A link to a file with a page leads to the page. A link to another file of the repository becomes
    its text. A broken link stays, and fails the build.

    Args:
        markdown: The text.
        source: Path of the text in the repository, which links are relative to.
        page: Path of the text's page.
        site: Path in the repository → path in the site's sources.
        root: The repository.
    """

    def change(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        for known in (path, posixpath.join(path, "README.md"), posixpath.join(path, "index.md")):
            if known in site:
                place = posixpath.relpath(site[known], posixpath.dirname(page) or ".")
                return f"{match['image']}[{match['text']}]({place}{'#' + anchor if anchor else ''})"
        return match["text"] if (root / path).exists() else match.group()

    return outside_fences(markdown, lambda part: _LINK.sub(change, part))
