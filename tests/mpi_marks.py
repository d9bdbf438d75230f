"""What the tests need of pytest-mpi, for machines that lack it: its two options, and ``min_size`` of the marker ``mpi``."""

from __future__ import annotations

import pytest


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--with-mpi", action="store_true", help="run the tests marked mpi, too; for mpirun")
    parser.addoption("--only-mpi", action="store_true", help="run the tests marked mpi; for mpirun")


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
