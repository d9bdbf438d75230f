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


def may_hold(path: Path, expression: str) -> bool:
    """Say whether a file of tests may have one that matches ``-m``.

    A test gets its marks from its own file, or from a fixture with a mark in its parameters
    (``device``: gpu), so ``tests/test_mpi_marks.py`` requires that no other file applies the marks
    that are searched for here.
    """
    wanted = asked_for(expression) & {"mpi", "slow"}
    if not wanted or not path.name.startswith("test_"):
        return True
    text = path.read_text(encoding="utf-8")
    return all(f"mark.{mark}" in text for mark in wanted)


def at_size(items: Sequence[pytest.Item], size: int) -> set[str]:
    """Return the ids of the items that a job of ``size`` ranks runs with ``--alternate``.

    The cases of a parametrized function are sorted by a checksum of their ids, which is independent
    of their meaning. Every other case runs at odd numbers of ranks, the rest at even ones: at 1 and
    3, or at 2 and 4. A function with one case, that needs three ranks or more, or is marked
    ``every_case``, runs all cases.
    """
    cases = defaultdict(list)
    for item in items:
        may_leave_out = "mpi" in item.keywords and "every_case" not in item.keywords
        is_case = hasattr(item, "callspec") and may_leave_out and least_size(item) < 3
        cases[item.nodeid.partition("[")[0] if is_case else item.nodeid].append(item.nodeid)
    chosen: set[str] = set()
    for ids in cases.values():
        ordered = sorted(ids, key=lambda name: zlib.crc32(name.encode()))
        chosen.update(ordered if len(ids) == 1 else ordered[size % 2 :: 2])
    return chosen


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
