"""A fresh group per test, fenced before and after, and checks that nothing was left behind."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist

from mpidist.comm.mpi.launcher_env import from_environment
from tests import mpi_marks
from tests.support import OnDevice, agree


def pytest_addoption(parser, pluginmanager):
    text = (
        "run each case of a parametrized MPI test at every other number of ranks: 1 and 3, or 2 "
        "and 4; `other`: vice versa"
    )
    parser.addoption("--alternate", nargs="?", const="one", choices=("one", "other"), help=text)
    if not pluginmanager.hasplugin("pytest_mpi"):
        mpi_marks.add_options(parser)
        pluginmanager.register(mpi_marks.MpiMarks())


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # pytest-mpi ends each rank's output with a page about MPI.
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False


def pytest_collectstart(collector):
    """Take the folder's name off the keywords of tests/comm/mpi: pytest-mpi would skip tests without MPI there."""
    if isinstance(collector, pytest.Package):
        collector.keywords._markers.pop("mpi", None)


def pytest_ignore_collect(collection_path, config):
    """Leave out files that hold no test with a mark that ``-m`` asks for: importing them takes each rank seconds."""
    if collection_path.suffix == ".py" and not mpi_marks.may_hold(
        collection_path, config.getoption("markexpr")
    ):
        return True
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--alternate"):
        size = from_environment(os.environ).size or 1
        chosen = mpi_marks.at_size(items, size + (config.getoption("--alternate") == "other"))
        left_out = [item for item in items if item.nodeid not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish(session):
    # Modules stay; without them the collection after each test takes microseconds instead of a
    # third of a second on busy cores.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _survivors_are_frozen() -> None:
    """Take what earlier modules have left (lazy imports, caches of torch) out of the collections after each test.

    torch._dynamo alone is 120,000 objects: 0.1 s a collection, of which a test of RPC makes three.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def world():
    """Return the group of all ranks, made once; ``MPIDIST_TEST_NODES=1`` has each rank taken to be a node of its own."""
    from mpidist.comm import init
    from mpidist.comm.mpi import runtime

    if os.environ.get("MPIDIST_TEST_NODES") == "1":
        runtime.World.nodes_of = lambda self, ranks: tuple(range(len(ranks)))
    return init()


@pytest.fixture
def group(world, request):
    """A group of all ranks with an order of its own; its thread must be gone after the test."""
    name = request.node.name
    world.barrier()
    fresh = world.clone(name)
    yield fresh
    fresh.close()
    gc.collect()
    left = [t.name for t in threading.enumerate() if t.name == f"mpidist-{name}"]
    agree(world, not left, f"threads left by {name}: {left}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Return where the test's tensors are: those that it makes without naming a device, values of the host's generators."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    # Convolutions round to TF32 by default (10 bits), and differently from one algorithm to the
    # next; tests compare to 1e-5. By this context and no assignment: torch's own test modules, once
    # collected, have frozen the flags.
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with exact, OnDevice(torch.device("cuda", 0)) as mode:
        yield mode.device


@pytest.fixture(scope="module")
def default_group(world):
    """torch's default group on our backend, for a module; verdicts go over a native group, which it cannot disturb."""
    dist.init_process_group("mpidist")
    yield dist.group.WORLD
    world.barrier()
    dist.destroy_process_group()
