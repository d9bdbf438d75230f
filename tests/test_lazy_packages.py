"""Imports at run time: packages by attribute, and what no import of the package may start."""

import importlib.util
import json
import sys

import pytest
import torch.distributed as dist

import mpidist
from tests.tools.support import started

# One new interpreter for all tests of this module: importing torch takes most of the time.
_PROGRAM = """
import importlib, json, sys

def loaded(*modules):
    return [name for name in modules if name in sys.modules]

import mpidist
found = {"before": [name for name in sys.modules if name.startswith("mpidist.")]}
found["first"] = loaded("torch", "mpi4py.MPI")
found["names"] = [mpidist.ddp.DistributedDataParallel.__module__, mpidist.rpc.rpc_sync.__name__]
found["names"] += [mpidist.slurm.Job.__module__]
parts = ("comm.group", "c10d.process_group", "c10d.backend", "ddp", "rpc", "autograd", "nn")
for name in ("torch", *(f"mpidist.{part}" for part in parts)):
    torch = importlib.import_module(name) if name == "torch" else torch
    importlib.import_module(name)
    found[name] = loaded("mpi4py.MPI", "cupy", "torch._dynamo")
    found[name] += ["CUDA"] * torch.cuda.is_initialized()
from mpidist.optim import functional
p = torch.nn.Parameter(torch.ones(3))
for name in functional.__all__[:-3]:
    if name == "FunctionalOptimizer": continue
    o = getattr(functional, name)([p])
    o.step([torch.ones(3)])
    o.load_state_dict(o.state_dict())
found["optim.functional"] = loaded("torch._dynamo")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    done = started([sys.executable, "-c", _PROGRAM], 100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_packages_are_imported_at_the_first_use_of_their_names(found):
    assert found["before"] == found["first"] == []
    assert found["names"] == ["mpidist.ddp.module", "rpc_sync", "mpidist.slurm.job"]


def test_an_import_starts_neither_mpi_nor_cuda_and_brings_no_dynamo(found):
    """A DataLoader worker that imports the user's script again must not start MPI.

    The import of Dynamo takes seconds on each worker.
    """
    started_by = {name: parts for name, parts in found.items() if name.startswith(("t", "mpidist"))}
    assert len(started_by) == 8 and not any(started_by.values()), started_by


def test_functional_optimizers_bring_no_dynamo(found):
    assert found["optim.functional"] == []


def test_a_name_that_does_not_exist_is_an_attribute_error():
    assert not hasattr(mpidist, "dpp") and {"ddp", "comm", "__version__"} <= set(dir(mpidist))


def test_groups_of_later_torch_versions_are_imported_where_it_has_older_names(monkeypatch):
    """Programs that walk the package import them on torch 2.11 and 2.12, too."""
    monkeypatch.delattr(dist.ProcessGroup, "all_gather_single", raising=False)
    found = importlib.util.find_spec("mpidist.c10d.process_group")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert "all_gather_single" not in vars(module.TorchProcessGroup)
