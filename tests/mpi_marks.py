"""Choice of the tests that a job runs: by its number of ranks, by the marks that ``-m`` asks for.

``MpiMarks`` is what the tests need of pytest-mpi, for machines that lack it.
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
    """Return the marks without which a test cannot match ``-m``: the terms of a conjunction that are not negated."""
    if re.search(r"\bor\b|[()]", expression):
        return set()
    terms = re.split(r"\band\b", expression)
    return {term.strip() for term in terms if re.fullmatch(r"\s*\w+\s*", term)}


def may_hold(path: Path, expression: str) -> bool:
    """Whether a file of tests may hold one that matches ``-m``.

    A test has its marks from its own file, or from a fixture that carries one in its parameters
    (``device``: gpu), so ``tests/test_mpi_marks.py`` requires that no other file applies the marks
    that are looked for here.
    """
    wanted = asked_for(expression) & {"mpi", "slow"}
    if not wanted or not path.name.startswith("test_"):
        return True
    text = path.read_text(encoding="utf-8")
    return all(f"mark.{mark}" in text for mark in wanted)


def at_size(items: Sequence[pytest.Item], size: int) -> set[str]:
    """Return the ids of the items that ``--alternate`` has a job of ``size`` ranks run.

    The cases of a parametrized function are put in the order of a checksum of their ids, which has
    nothing to do with what they stand for. Every other one runs at odd numbers of ranks, the rest
    at even ones: at 1 and 3, or at 2 and 4. A function with one case, that needs three ranks or
    more, or is marked ``every_case``, runs whole.
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
    """A plugin of pytest that skips as pytest-mpi does."""

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
