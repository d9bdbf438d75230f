"""Events of MkDocs: pages from files of the repository, and contents for markers.

``<!-- results: NAME [key=value …] -->`` shows a record of ``benchmarks/results``, ``<!-- plot: NAME
-->`` its plot alone, ``<!-- scaling -->`` all records of scaling, ``<!-- api: MODULE [NAME …] -->``
public names, ``<!-- command -->`` the subcommands; ``<!-- decisions -->``, ``<!-- modules -->`` and
``<!-- job scripts -->`` their lists, ``<!-- text: FILE -->`` a text of the repository without its
title.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import api_pages
import command_reference
import module_tables
import repository_links
import result_tables
import scaling_tables
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

_MARKER = re.compile(
    r"<!-- (?P<kind>results|plot|scaling|api|command|decisions|modules|job scripts|text)"
    r"(?:: (?P<text>.*?))? -->"
)
_SOURCES: dict[str, str] = {}
# Pages about the history of mpidist, ranked after the users' pages in a search.
_BEHIND = (
    "decisions/",
    "changelog.md",
    "contributing.md",
    "architecture.md",
    "modules.md",
    "benchmarks.md",
    "examples/",
)


def on_files(files: Any, config: Any) -> Any:
    """Add files outside ``docs``: texts, programs, records and plots."""
    root = _root(config)
    _SOURCES.clear()
    programs = repository_links.programs(root)
    for source, page in repository_links.texts(root).items():
        text = repository_links.named(root / source, programs)
        files.append(File.generated(config, page, content=text))
        _SOURCES[page] = source
    for source, page in programs.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(
            File.generated(
                config,
                page,
                content=f'# {Path(source).name}\n\n```python title="{source}"\n{text}```\n',
            )
        )
        _SOURCES[page] = source
    for source, place in repository_links.results(root).items():
        files.append(File.generated(config, place, abs_src_path=str(root / source)))
        _SOURCES[place] = source
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace the markers of a page, then its links."""
    root = _root(config)
    uri = page.file.src_uri
    if uri.startswith(_BEHIND):
        page.meta.setdefault("search", {"boost": 0.3})
    elif not uri.startswith("api/"):
        page.meta.setdefault("search", {"boost": 3})
    try:
        markdown = repository_links.outside_fences(
            markdown, lambda part: _MARKER.sub(lambda found: _filled(found, root, uri), part)
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise PluginError(f"{uri}: {type(error).__name__}: {error}") from error
    site = {f"docs/{file.src_uri}": file.src_uri for file in files} | {
        source: place for place, source in _SOURCES.items()
    }
    site |= {"README.md": "index.md", "slurm": "slurm.md", "slurm/README.md": "slurm.md"}
    return repository_links.rewrite(markdown, _SOURCES.get(uri, f"docs/{uri}"), uri, site, root)


def _root(config: Any) -> Path:
    return Path(config.config_file_path).resolve().parent


def _filled(found: re.Match[str], root: Path, uri: str) -> str:
    text = found["text"] or ""
    if found["kind"] == "api":
        module, *names = text.split()
        return api_pages.directives(module, names)
    if found["kind"] == "command":
        return command_reference.reference(text or None)
    if found["kind"] == "text":
        body = (root / text).read_text(encoding="utf-8").partition("\n")[2]
        return repository_links.rebased(body, text, f"docs/{uri}")
    if found["kind"] == "modules":
        return module_tables.tables(root)
    if found["kind"] == "decisions":
        return _decisions(root)
    if found["kind"] == "job scripts":
        return _job_scripts(root)
    if found["kind"] == "scaling":
        return _scaling(root)
    if found["kind"] == "plot":
        return repository_links.rebased(
            result_tables.plot(text.strip()), "docs/figures.md", f"docs/{uri}"
        )
    return _record(root, *result_tables.parse(text))


def _record(root: Path, name: str, choice: dict[str, list[str]]) -> str:
    folder = root / "benchmarks" / "results"
    record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return result_tables.section(name, record, (folder / f"{name}.png").is_file(), choice)


def _scaling(root: Path) -> str:
    folder = root / "benchmarks" / "results"
    parts = []
    for path in sorted(folder.glob("scaling-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        about = (
            f"*{result_tables.machine(record)}.* [{path.name}](../benchmarks/results/{path.name})"
        )
        if scaling_tables.is_startup(record):
            parts += ["### Start-up", about, scaling_tables.startup(record)]
        elif scaling_tables.is_scaling(record):
            plot = result_tables.plot(path.stem) if path.with_suffix(".png").is_file() else ""
            parts += [
                f"### {record['jobs'][0]['environment']['mpi_library']}",
                about,
                plot,
                scaling_tables.tables(record),
            ]
    return "\n\n".join(["## What was measured", *parts]) if parts else ""


def _decisions(root: Path) -> str:
    rows = []
    for path in sorted((root / "docs" / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        rows.append(f"- [{title}](decisions/{path.name})")
    return "\n".join(rows)


def _job_scripts(root: Path) -> str:
    parts = []
    for path in sorted((root / "slurm").iterdir()):
        if path.suffix in (".sh", ".sbatch"):
            parts.append(
                f"### {path.name}\n\n```bash "
                f'title="slurm/{path.name}"\n{path.read_text(encoding="utf-8")}```'
            )
    return "\n\n".join(parts)
