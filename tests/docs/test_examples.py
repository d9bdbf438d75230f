"""Programs of the documentation, run unchanged at their number of ranks or more."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.docs.fences import all_examples, examples_of
from tests.tools.support import ROOT

EXAMPLES = [
    pytest.param(one, id=one.place, marks=pytest.mark.mpi(min_size=one.ranks))
    for one in all_examples()
]


@pytest.mark.mpi
@pytest.mark.parametrize("example", EXAMPLES)
def test_programs_of_the_pages_run(example, world, tmp_path, monkeypatch):
    # One folder for all ranks, because a program may write what another rank reads.
    monkeypatch.chdir(world.broadcast_object(str(tmp_path), 0))
    # A named module, so that other ranks find its functions and classes by name.
    module = types.ModuleType("docs_" + re.sub(r"\W", "_", example.place))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    environment = dict(os.environ)
    try:
        exec(
            compile("\n" * (example.line - 1) + example.code, example.page, "exec"), module.__dict__
        )
        world.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]


def test_pages_have_programs():
    pages = {one.page for one in all_examples()}
    assert (
        len(EXAMPLES) >= 18
        and {f"docs/{name}.md" for name in ("index", "rpc", "checkpoints", "migration/horovod")}
        <= pages
    )


def test_marked_blocks_are_found_with_their_ranks_and_lines():
    page = "# A\n\n<!-- run: 2 -->\n```python\nx = 1\n```\n\n```python\nnot run\n```\n"
    page += "\n    <!-- run -->\n    ```python\n    y = 2\n    ```\n"
    first, second = examples_of(page, "a.md")
    assert (first.place, first.ranks, first.code) == ("a.md:5", 2, "x = 1")
    assert (second.ranks, second.code) == (1, "y = 2")


def test_all_python_blocks_of_the_pages_are_programs():
    # Other blocks are only parsed: a page must not show invalid Python.
    for page in sorted(Path(ROOT, "docs").rglob("*.md")):
        for block in re.findall(
            r"^( *)```python[^\n]*\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S
        ):
            code = "\n".join(line[len(block[0]) :] for line in block[1].splitlines())
            compile(code, str(page), "exec")


def test_commands_of_the_pages_exist_with_their_options():
    import typer

    from mpidist.cli.app import app

    commands = typer.main.get_command(app).commands
    lines = [
        line
        for page in sorted(Path(ROOT, "docs").rglob("*.md"))
        for line in re.findall(r"^(?!pip ).*\bmpidist ((?!--)[a-z].*)$", _commands(page), re.M)
    ]
    assert len(lines) > 15
    for line in lines:
        # Arguments after -- and after the program belong to other programs.
        name, *rest = line.partition("#")[0].split()
        own = rest[
            : next(
                (place for place, word in enumerate(rest) if word == "--" or word.endswith(".py")),
                len(rest),
            )
        ]
        known = {
            option
            for parameter in commands[name].params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in own if word.startswith("-")} <= known, line


def test_recipes_install_from_a_checkout_or_a_wheel():
    """The project is on no package index: pip would fail, or take another's package."""
    for page in _pages():
        for block in _blocks(page):
            for line in re.sub(r" #.*", "", block).splitlines():
                by_name = re.search(
                    r"\bpip (install|download)\b.*[\s'\"]mpidist($|[\s\['\"=<>])", line
                )
                assert by_name is None or "--find-links" in line, f"{page}: {line}"


def test_copied_commands_have_no_prompt():
    for page in _pages():
        for block in _blocks(page):
            assert not re.search(r"^ *[$%] ", block, re.M), f"{page}: {block}"


def _pages() -> list[Path]:
    folders = ("benchmarks", "docs", "examples", "packaging", "slurm")
    pages = [
        *ROOT.glob("*.md"),
        *(page for name in folders for page in (ROOT / name).rglob("*.md")),
    ]
    assert len(pages) > 40
    return pages


def _blocks(page: Path) -> list[str]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^ *```\w*[^\n]*\n(.*?)^ *```$", text, re.M | re.S)


def test_names_of_the_pages_exist():
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in [*ROOT.glob("*.md"), *Path(ROOT, "docs").rglob("*.md")]
        if path.name != "CHANGELOG.md"
    }
    names = {
        (path, name)
        for path, text in texts.items()
        for name in re.findall(r"(?<![\w./:@-])mpidist(?:\.[a-z_]\w*)*\.\w+", text)
    }
    assert len(names) > 100
    assert [f"{path.name}: {name}" for path, name in names if not is_name(name)] == []
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("mpidist", "slurm", "tests")
        for path in Path(ROOT, folder).rglob("*")
        if path.suffix in (".py", ".sh", ".sbatch") and path != Path(__file__)
    )
    variables = set(re.findall(r"\bMPIDIST_[A-Z_]+[A-Z]\b", "".join(texts.values())))
    assert len(variables) > 10 and variables <= set(re.findall(r"\bMPIDIST_\w+", code))


def is_name(name: str) -> bool:
    """Return whether a dotted name is one of a module, or of an attribute in it."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return _is_in_source(name)
    return True


def _is_in_source(name: str) -> bool:
    """Return whether a name is a module of mpidist.frameworks, or a class defined in one.

    Those modules import frameworks, which need not be installed.
    """
    package = Path(ROOT, "mpidist", "frameworks")
    module, _, attribute = name.removeprefix("mpidist.frameworks.").partition(".")
    file = package / f"{module}.py"
    if not name.startswith("mpidist.frameworks.") or not file.is_file():
        return False
    return not attribute or f"class {attribute}(" in file.read_text(encoding="utf-8")


def test_missing_names_are_seen():
    assert is_name("mpidist.ddp.hooks.checkpoint") and is_name("mpidist.optim.OSS")
    assert is_name("mpidist.frameworks.fabric.DDPStrategy")
    assert not is_name("mpidist.frameworks.fabric.Strategy")
    assert not is_name("mpidist.optim.Oss") and not is_name("mpidist.nowhere.x")


def _commands(page: Path) -> str:
    return "\n".join(
        re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    )
