"""Command line of the embedding server's program."""

from __future__ import annotations

import argparse
from pathlib import Path

from command_line import parse, positive, require_folder
from text_training import add_characters

import mpidist.comm


def parse_options(group: mpidist.comm.ProcessGroup) -> argparse.Namespace:
    """Return the options; an invalid command line, or folder, ends all ranks.

    Collective: over ``group``.
    """
    parser = argparse.ArgumentParser(
        description="Train embedding tables on servers and a data-parallel part on trainers."
    )
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument(
        "--servers", type=positive, help="ranks that hold tables (default: half of them)"
    )
    parser.add_argument("--batch-size", type=positive, default=128, help="of each trainer")
    parser.add_argument("--vocabulary", type=positive, default=2000)
    parser.add_argument("--dim", type=positive, default=64, help="columns of all tables together")
    add_characters(parser)
    parser.add_argument(
        "--output", type=Path, help="folder of hybrid.png and hybrid.json (written if given)"
    )
    options = parse(parser, group.rank, lambda options: _problem_of(options, group.size))
    if options.output:
        require_folder(group, options.output)
    return options


def _problem_of(options: argparse.Namespace, ranks: int) -> str | None:
    if options.servers and options.servers >= max(ranks, 2):
        return f"--servers {options.servers} leaves no trainer among {ranks} rank(s)"
    if options.servers and options.servers > options.dim:
        return f"--servers {options.servers}: more than there are columns (--dim {options.dim})"
    for name, least in {"characters": 1000, "vocabulary": 2}.items():
        if getattr(options, name) < least:
            return f"--{name}: at least {least}"
    return None
