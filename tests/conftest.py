"""Fixtures: a new group per test, barriers before and after, and checks for leaks."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import threading

import pytest
import torch
import torch.distributed as dist
from _pytest import faulthandler as pytest_faulthandler

from mpidist.comm.mpi.launcher_env import from_environment
from tests.tools import mpi_marks
from tests.tools.support import OnDevice, agree


def pytest_addoption(parser, pluginmanager):
    text = (
        "run each case of a parametrized MPI test at one number of ranks (1 and 2, or 3; of "
        "tests/comm 4, too), and a test with one case at 1, and at 2 or 3 (near MPI on the other "
        "MPI, too); `other`: the cases that are left to the other MPI"
    )
    parser.addoption("--alternate", nargs="?", const="one", choices=("one", "other"), help=text)
    if not pluginmanager.hasplugin("pytest_mpi"):
        mpi_marks.add_options(parser)
        pluginmanager.register(mpi_marks.MpiMarks())


# Timeouts of tests write no flight record into the home folder, except where a test asks for one.
os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "0")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # pytest-mpi would add a page about MPI to each rank's output.
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False
    _print_only_the_thread_that_crashed(config)


def _print_only_the_thread_that_crashed(config):
    # Of all threads, faulthandler prints the newest first: a log that keeps the first lines of an
    # error had the stacks of idle threads, and neither the test nor the call that crashed.
    key = getattr(pytest_faulthandler, "fault_handler_stderr_fd_key", None)
    if faulthandler.is_enabled() and key in config.stash:
        faulthandler.enable(file=config.stash[key], all_threads=False)


def pytest_itemcollected(item):
    """Remove the folder's name from the keywords of tests/comm/mpi; refuse caplog in MPI tests.

    pytest-mpi would take the name for the mark and skip the tests without MPI there.
    """
    for node in item.listchain():
        if isinstance(node, pytest.Package):
            node.keywords._markers.pop("mpi", None)
    if "caplog" in getattr(item, "fixturenames", ()) and item.get_closest_marker("mpi"):
        raise pytest.UsageError(
            f"{item.nodeid}: caplog drops what another rank's first messages log; use logged"
        )


def pytest_ignore_collect(collection_path, config):
    """Skip files without a test whose marks match ``-m``: importing takes each rank seconds."""
    if collection_path.suffix == ".py" and not mpi_marks.may_hold(
        collection_path, config.getoption("markexpr")
    ):
        return True
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--alternate"):
        size = from_environment(os.environ).size or 1
        chosen = mpi_marks.at_size(items, size, config.getoption("--alternate") == "other")
        left_out = [item for item in items if item.nodeid not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish(session):
    # Modules live for the whole run. Without them a collection after each test takes microseconds
    # instead of a third of a second on busy cores.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _survivors_are_frozen() -> None:
    """Exclude objects of earlier modules (lazy imports, caches of torch) from garbage collections.

    torch._dynamo alone has 120,000 objects: 0.1 s per collection, and a test of RPC makes three.
    """
    # torch's reader of flight-recorder dumps leaves it disabled.
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def world():
    """Return the group of all ranks; ``MPIDIST_TEST_NODES=1`` makes each rank a node of its own."""
    from mpidist.comm import init
    from mpidist.comm.mpi import runtime

    if os.environ.get("MPIDIST_TEST_NODES") == "1":
        runtime.World.nodes_of = lambda self, ranks: tuple(range(len(ranks)))
    return init()


@pytest.fixture
def group(world, request):
    """Return a group of all ranks with a communicator of its own; its thread ends with the test."""
    name = request.node.name
    world.barrier()
    fresh = world.clone(name)
    yield fresh
    fresh.close()
    gc.collect()
    left = [t.name for t in threading.enumerate() if t.name == f"mpidist-{name}"]
    agree(world, not left, f"threads left by {name}: {left}")


class _Records(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture
def logged(world):
    """Return the list of what mpidist logs on this rank from before any rank begins the test.

    pytest's caplog forgets what was logged while this rank was still in its fixtures, where another
    rank's first messages may reach it.
    """
    logger, handler = logging.getLogger("mpidist"), _Records()
    logger.addHandler(handler)
    world.barrier()
    yield handler.texts
    logger.removeHandler(handler)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Return the default device of the test's tensors; random values are generated on the host."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    # Convolutions use TF32 by default (10 bits) and differ between algorithms; tests compare to
    # 1e-5. A context and not an assignment, because torch's own test modules freeze the flags when
    # collected.
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with exact, OnDevice(torch.device("cuda", 0)) as mode:
        yield mode.device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request):
    """Return the device that a test names for its tensors; the CPU runs the test's body dry."""
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with exact:
        yield torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(scope="module")
def default_group(world):
    """Make torch's default group on this backend, for a module; verdicts use a native group."""
    dist.init_process_group("mpidist")
    yield dist.group.WORLD
    world.barrier()
    dist.destroy_process_group()
