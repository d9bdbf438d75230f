"""Replacement of torch's names of RPC, by the module that reads them."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

from mpidist.c10d import rpc_names
from mpidist.rpc.rref import RRef as Ours

RPC = importlib.import_module("torch.distributed.rpc")
Torchs = vars(RPC)["RRef"]


@pytest.fixture
def installed():
    rpc_names.install()
    yield
    rpc_names._finder.kinds.clear()
    if rpc_names._finder in sys.meta_path:
        sys.meta_path.remove(rpc_names._finder)
    for name in rpc_names._NAMES:
        if name in sys.modules:
            sys.modules[name].__class__ = ModuleType


def asked_by(module):
    found: dict = {"__name__": module}
    exec("from torch.distributed.rpc import RRef as a", found)
    exec("import torch.distributed.rpc as rpc; b = rpc.RRef", found)
    assert found["a"] is found["b"]
    return found["a"]


@pytest.mark.usefixtures("installed")
def test_programs_get_ours_and_torch_its_own():
    assert asked_by("__main__") is asked_by("torchvision.models") is Ours
    assert asked_by("torch._jit_internal") is Torchs
    assert vars(RPC)["RRef"] is Torchs  # as the module's own functions read it


@pytest.mark.usefixtures("installed")
def test_every_name_is_there_and_in_torch():
    for theirs, (ours, replaced) in rpc_names._NAMES.items():
        module = importlib.import_module(theirs)
        for name in replaced:
            assert name in vars(module), f"{theirs} of this torch has no {name}"
            assert getattr(module, name) is getattr(importlib.import_module(ours), name)


@pytest.mark.usefixtures("installed")
def test_a_program_may_put_an_object_of_its_own_there(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RPC, "RRef", str)
        assert RPC.RRef is str
    assert RPC.RRef is Ours


@pytest.mark.slow
def test_a_module_that_is_imported_later_is_replaced_then():
    program = (
        "import sys; from mpidist.c10d import rpc_names; import torch; rpc_names.install(); "
        "assert 'torch.distributed.optim' not in sys.modules; "
        "assert 'mpidist.rpc.api' not in sys.modules; "
        "from torch.distributed.optim import DistributedOptimizer as a, ZeroRedundancyOptimizer; "
        "from torch.distributed.optim.optimizer import DistributedOptimizer as b; "
        "print(a.__module__, b.__module__, ZeroRedundancyOptimizer.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [
        "mpidist.optim.distributed_optimizer",
        "mpidist.optim.distributed_optimizer",
        "torch.distributed.optim.zero_redundancy_optimizer",
    ], done.stderr
