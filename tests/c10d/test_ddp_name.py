"""Replacement of torch's name DistributedDataParallel, by the module that reads it."""

import sys
from types import ModuleType

import pytest
import torch

from mpidist.c10d import ddp_name
from mpidist.ddp.module import DistributedDataParallel as Ours

MODULES = ("torch.nn.parallel", "torch.nn.parallel.distributed")
Torchs = vars(sys.modules[MODULES[1]])["DistributedDataParallel"]


@pytest.fixture
def installed():
    ddp_name.install()
    yield
    for name in MODULES:
        sys.modules[name].__class__ = ModuleType


def asked_by(module):
    found: dict = {"__name__": module}
    exec("from torch.nn.parallel import DistributedDataParallel as a", found)
    exec("import torch; b = torch.nn.parallel.distributed.DistributedDataParallel", found)
    assert found["a"] is found["b"]
    return found["a"]


@pytest.mark.usefixtures("installed")
def test_programs_get_ours_and_torchs_own_parts_theirs():
    for module in (
        "__main__",
        "lightning.fabric.strategies.ddp",
        "torch.distributed.checkpoint.state_dict",
    ):
        assert asked_by(module) is Ours
    for module in (
        "torch._dynamo.convert_frame",
        "torch.distributed._composable.replicate",
        "torch.distributed.pipelining.stage",
    ):
        assert asked_by(module) is Torchs
    # The methods of torch's class read the name in their module's globals.
    assert vars(sys.modules[MODULES[1]])["DistributedDataParallel"] is Torchs


@pytest.mark.usefixtures("installed")
def test_a_child_of_multiprocessing_gets_torchs(monkeypatch):
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    assert asked_by("__main__") is Torchs


@pytest.mark.usefixtures("installed")
def test_a_program_may_put_a_class_of_its_own_there(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.parallel, "DistributedDataParallel", str)
        assert torch.nn.parallel.DistributedDataParallel is str
    assert torch.nn.parallel.DistributedDataParallel is Ours
    # unittest.mock reads the module's dictionary and restores the value found there.
    torch.nn.parallel.DistributedDataParallel = Torchs
    assert torch.nn.parallel.DistributedDataParallel is Ours
