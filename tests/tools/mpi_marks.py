"""Selection of the tests that a job runs: by its number of ranks and by the marks of ``-m``.

``MpiMarks`` replaces pytest-mpi on machines that lack it.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--with-mpi", action="store_true", help="run the tests marked mpi, too; for mpirun"
    )
    parser.addoption("--only-mpi", action="store_true", help="run the tests marked mpi; for mpirun")


def asked_for(expression: str) -> set[str]:
    """Return the marks that a test needs to match ``-m``: its terms without ``not``."""
    if re.search(r"\bor\b|[()]", expression):
        return set()
    terms = re.split(r"\band\b", expression)
    return {term.strip() for term in terms if re.fullmatch(r"\s*\w+\s*", term)}


def refused(expression: str) -> set[str]:
    """Return the marks that a test must not have to match ``-m``: its terms with ``not``."""
    if re.search(r"\bor\b|[()]", expression):
        return set()
    return set(re.findall(r"\bnot\s+(\w+)", expression))


def may_hold(path: Path, expression: str) -> bool:
    """Return whether a file of tests may have one that matches ``-m``.

    A test gets its marks from its own file, or from a fixture with a mark in its parameters
    (``device``: gpu), so ``tests/tools/test_mpi_marks.py`` requires that no other file applies the
    marks that are searched for here. A mark in a line ``pytestmark = ...`` is one of all tests.
    """
    searched = {"mpi", "slow"}
    wanted, unwanted = asked_for(expression) & searched, refused(expression) & searched
    if not (wanted or unwanted) or not path.name.startswith("test_"):
        return True
    text = path.read_text(encoding="utf-8")
    of_all = " ".join(re.findall(r"^pytestmark = .*", text, re.MULTILINE))
    return all(f"mark.{mark}" in text for mark in wanted) and not any(
        re.search(rf"mark\.{mark}\b", of_all) for mark in unwanted
    )


# The job of the other MPI, among numbers of ranks.
OTHER = -1
# Folders whose tests the other MPI runs, too (``make mpich-2``); and those whose code calls MPI:
# there it runs functions of one case, too.
BOTH_MPIS = ("autograd", "c10d", "comm", "ddp", "fuzz", "integration", "kernels", "rpc")
_NEAR_MPI = ("c10d", "comm", "fuzz", "integration", "rpc")
# Folders that both jobs of the other MPI run, of two ranks and of three: each case in one of them.
DEALT_ON_OTHER = ("comm",)
# Folders whose algorithms have another form at four ranks than at three (trees, rings, nodes of
# several ranks). All others run there what needs four ranks: on two cores they mostly take turns.
AT_FOUR = ("comm",)


def at_size(items: Sequence[pytest.Item], size: int, is_other: bool = False) -> set[str]:
    """Return the ids of the items that a job of ``size`` ranks runs with ``--alternate``.

    The cases of a parametrized function are sorted by a checksum of their ids, which is independent
    of their meaning, and dealt in turn to 1 and 2, or 3 ranks, to 4 in ``AT_FOUR``, and to the
    other MPI where it runs the function's folder. A function with one case runs at 1 rank, and at 2
    or 3; one of a folder near MPI at 1 rank, at 3 (in ``AT_FOUR`` 2, 3 or 4), and on the other MPI.
    What needs four ranks runs at 4. The turn begins at a checksum of the function's name. What the
    other MPI runs of ``DEALT_ON_OTHER`` is dealt to two and three ranks there; a function with one
    case runs at 2 ranks on one MPI, and at 3 or 4 on the other. What is marked ``every_case`` runs
    everywhere.

    Args:
        items: Items of all functions that are to run.
        size: Number of ranks, at most 4.
        is_other: The job is of the other MPI.
    """
    place = OTHER if is_other else size
    functions = defaultdict(list)
    chosen: set[str] = set()
    for item in items:
        if "mpi" in item.keywords and "every_case" not in item.keywords:
            functions[item.nodeid.partition("[")[0]].append(item)
        else:
            chosen.add(item.nodeid)
    for name, cases in functions.items():
        folder = name.split("/")[1] if "/" in name else ""
        turns = _turns(least_size(cases[0]), len(cases), folder)
        ordered = sorted((case.nodeid for case in cases), key=_checksum)
        least = least_size(cases[0])
        for number, case in enumerate(ordered, _checksum(name)):
            turn = turns[number % len(turns)]
            if place in turn and (
                not is_other
                or folder not in DEALT_ON_OTHER
                or size == max(least, _size_on_other(case, turn))
            ):
                chosen.add(case)
    return chosen


def _size_on_other(case: str, turn: set[int]) -> int:
    """Return the number of ranks, 2 or 3, at which the other MPI runs a case of a turn."""
    if len(turn) == 1:
        return 2 + _checksum(case) // 2 % 2
    return 3 if 2 in turn else 2


def _turns(least: int, cases: int, folder: str) -> Sequence[set[int]]:
    """Return the jobs of each turn, for a function that needs ``least`` ranks."""
    if least > 3:
        return [{4} if least == 4 else set()]
    turns: tuple[set[int], ...]
    if cases > 1:
        turns = ({1, 2}, {3})
        if folder in AT_FOUR:
            turns += ({4},)
        if folder in BOTH_MPIS:
            turns += ({OTHER},)
    elif folder in AT_FOUR:
        turns = ({1, 3, OTHER}, {1, 4, OTHER}, {1, 2, OTHER}) if least < 3 else ({3, 4, OTHER},)
    elif folder in _NEAR_MPI:
        turns = ({1, 3, OTHER},)
    else:
        turns = ({1, 2}, {1, 3})
    # The other MPI's jobs have two or three ranks.
    able = [{size for size in turn if size >= least or size == OTHER} for turn in turns]
    return [turn for turn in able if turn]


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode())


def least_size(item: pytest.Item) -> int:
    """Return the number of ranks that a test needs."""
    return max((mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi")), default=1)


class MpiMarks:
    """Pytest plugin that skips tests as pytest-mpi does."""

    def pytest_collection_modifyitems(self, config, items):
        with_mpi, only_mpi = config.getoption("--with-mpi"), config.getoption("--only-mpi")
        for item in items:
            is_mpi = "mpi" in item.keywords
            if only_mpi and not with_mpi and not is_mpi:
                item.add_marker(pytest.mark.skip(reason="test does not use mpi"))
            elif is_mpi and not (with_mpi or only_mpi):
                item.add_marker(pytest.mark.skip(reason="need --with-mpi option to run"))

    def pytest_runtest_setup(self, item):
        least = least_size(item)
        if least > 1:
            from mpidist.comm.mpi import runtime

            size = runtime.world().size
            if size < least:
                pytest.skip(f"needs {least} ranks; there are {size}")
