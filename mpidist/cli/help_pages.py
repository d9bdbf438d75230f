"""Help pages of the ``mpidist`` command: usage lines, flags without a type, shipped files."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from mpidist import shipped


class Pages:
    """Help page of a command; the mixin for commands and groups."""

    def get_params(self, ctx: Any) -> list[Any]:
        """See click's Command; a flag has no type to name."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters


class Group(Pages, TyperGroup):
    """The command ``mpidist``."""


class Command(Pages, TyperCommand):
    """Subcommand of ``mpidist``.

    Attributes:
        behind: End of the usage line: arguments that are passed on.
        title: Title of the panel of shipped files; "" without such a panel.
    """

    behind: tuple[str, ...] = ()
    title = ""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """See click's Command."""
        return [*super().collect_usage_pieces(ctx), *self.behind]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See click's Command; the panel of shipped files comes last."""
        super().format_help(ctx, formatter)
        if self.title:
            print_panel(self.title, self.described(), Console())

    def described(self) -> Mapping[str, str]:
        """Return a description of each shipped file that the command takes, by name."""
        return {}


class RunCommand(Command):
    """Command line of a program behind the options."""

    behind = ("PROGRAM", "[ARGS]...")


class ForwardingCommand(Command):
    """Command with arguments behind ``--``; an unknown option's error names the ``--``.

    Attributes:
        what: These arguments in words.
        example: Of them.
    """

    what = "The program and its options"
    example = ""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """See click's Command."""
        given = list(args)  # consumed
        try:
            return super().make_context(info_name, args, parent, **extra)
        except Exception as error:
            # click's, which typer imports or has within itself, by its version.
            if type(error).__name__ == "NoSuchOption" and "--" not in given:
                error.message += (  # type: ignore[attr-defined]
                    f". {self.what} stand behind --: mpidist {info_name} ... -- {self.example}"
                )
            raise


class BenchCommand(ForwardingCommand):
    """Benchmark, and its options behind ``--``."""

    behind = ("[-- OPTIONS...]",)
    what = "Options of the benchmark"
    example = "--quick"
    title = "Benchmarks"

    def described(self) -> Mapping[str, str]:
        """See ``Command``."""
        return benchmarks(shipped.folder("benchmarks"))


class TuneCommand(Command):
    """Options of the measurement behind those of the start."""

    behind = ("[MEASUREMENT OPTIONS]...",)


class SubmitCommand(ForwardingCommand):
    """Job script, and a program behind ``--``."""

    behind = ("[-- PROGRAM [ARGS]...]",)
    example = "train.py --epochs 3"
    title = "Job scripts"

    def described(self) -> Mapping[str, str]:
        """See ``Command``."""
        return job_scripts(shipped.folder("slurm"))


def benchmarks(folder: Path) -> dict[str, str]:
    """Return the first line of the docstring of each ``bench_<name>.py``, by name."""
    from mpidist.cli.bench import RANKS

    found = {}
    for name in RANKS:
        text = (folder / f"bench_{name}.py").read_text(encoding="utf-8")
        found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def job_scripts(folder: Path) -> dict[str, str]:
    """Return the first sentence below the header of each job script, by name."""
    found = {}
    for path in sorted(folder.glob("*.sbatch")):
        words: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("#!", "#SBATCH")) or line == "#":
                continue
            # The usage is indented within the comment.
            if not line.startswith("# ") or line.startswith("#  "):
                break
            words += line[1:].split()
        found[path.stem] = " ".join(words).partition(". ")[0].rstrip(".")
    return found


def print_panel(title: str, described: Mapping[str, str], to: Console) -> None:
    """Print names and descriptions in a panel like typer's."""
    table = Table(box=None, show_header=False, expand=True)
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column(ratio=1)
    for name, text in described.items():
        table.add_row(name, text)
    to.print(Panel(table, title=title, title_align="left", border_style="dim"), highlight=False)
