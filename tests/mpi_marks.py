"""What the tests need of pytest-mpi, for machines that lack it: its two options, and ``min_size`` of the marker ``mpi``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--with-mpi", action="store_true", help="run the tests marked mpi, too; for mpirun")
    parser.addoption("--only-mpi", action="store_true", help="run the tests marked mpi; for mpirun")


def asked_for(expression: str) -> set[str]:
    """Return the marks without which a test cannot match ``-m``: the terms of a conjunction that are not negated."""
    if re.search(r"\bor\b|[()]", expression):
        return set()
    terms = re.split(r"\band\b", expression)
    return {term.strip() for term in terms if re.fullmatch(r"\s*\w+\s*", term)}


def may_hold(path: Path, expression: str) -> bool:
    """Whether a file of tests may hold one that matches ``-m``.

    A test has its marks from its own file, or from a fixture that carries one in its parameters (``device``: gpu), so
    ``tests/test_mpi_marks.py`` requires that no other file applies the marks that are looked for here.
    """
    wanted = asked_for(expression) & {"mpi", "slow"}
    if not wanted or not path.name.startswith("test_"):
        return True
    text = path.read_text(encoding="utf-8")
    return all(f"mark.{mark}" in text for mark in wanted)


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
        least = max((mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi")), default=1)
        if least > 1:
            from mpidist.comm import runtime

            size = runtime.world().size
            if size < least:
                pytest.skip(f"needs {least} ranks; there are {size}")
