"""Tables of modules, one per package: names, and the first sentences of the docstrings."""

from __future__ import annotations

import ast
from pathlib import Path


def tables(root: Path) -> str:
    """Return the tables of all packages under ``mpidist``, each behind a heading and its path.

    Raises:
        ValueError: A module has no docstring.
    """
    parts = []
    for folder in sorted({path.parent for path in (root / "mpidist").rglob("*.py")}):
        name = folder.relative_to(root).as_posix()
        files = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
        rows = [f"| `{path.stem}` | {_escaped(_summary(path))} |" for path in files]
        heading = f"## {name}\n\n{_summary(folder / '__init__.py')}"
        parts.append("\n".join([heading, "", "| module | contents |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path.name} has no docstring")
    return docstring.partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
