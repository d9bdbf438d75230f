"""Estimated memory of a rank against the tensors of real training steps."""

import importlib

import pytest
import torch
from torch import nn

from mpidist.ddp import DistributedDataParallel, PowerSGDState, powerSGD_hook
from mpidist.optim import OSS
from tests.tools.support import ROOT, agree

# Padding of parameters to 64 elements is the largest part that differs.
WITHIN = 0.02


@pytest.fixture
def estimates(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scaling.memory_estimate")


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 256), nn.LayerNorm(256), nn.Linear(256, 200)
    )


def bytes_of(tensors):
    """Return the bytes from the first to the last element in each piece of memory."""
    spans = {}
    for tensor in tensors:
        at, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        key = tensor.untyped_storage().data_ptr()
        first, last = spans.get(key, (at, end))
        spans[key] = min(first, at), max(last, end)
    return sum(last - first for first, last in spans.values())


def state_bytes(optimizer):
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )


CASES = [
    ("none", "adam", 0, False),
    ("none", "momentum", 0, True),
    ("none", "sgd", 0, False),
    ("greedy", "adam", 0, False),
    ("balanced", "adam", 0, False),
    ("flat", "adam", 0, False),
    ("flat", "momentum", 4, False),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("partition", "name", "rank", "copies"), CASES)
def test_the_estimate_is_the_size_of_the_objects(group, estimates, partition, name, rank, copies):
    ddp = DistributedDataParallel(net(), process_group=group, gradient_as_bucket_view=not copies)
    hook = PowerSGDState(group, rank or 1, start_powerSGD_iter=2, min_compression_rate=2)
    if rank:
        ddp.register_comm_hook(hook, powerSGD_hook)
    kind, options = {
        "adam": (torch.optim.Adam, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}),
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
    }[name]
    own = ddp.parameters()
    optimizer = (
        kind(own, **options)
        if partition == "none"
        else OSS(own, kind, group, partition=partition, **options)
    )
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(3, 200)).sum().backward()
        optimizer.step()
    parameters = list(ddp.parameters())
    gradients = [parameter.grad for parameter in parameters]
    measured = {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(gradients),
        "state": max(group.all_gather_object(state_bytes(optimizer))),
        "powersgd": sum(
            tensor.nbytes
            for held in (hook.error_dict, hook.q_memory_dict)
            for tensor in held.values()
        ),
    }
    found = estimates.estimate(
        [tuple(parameter.shape) for parameter in parameters],
        estimates.Training(group.size, name, partition, 4, rank, copies),
    )
    buckets = found["buckets, which gradients are views of"]
    estimated = {
        "parameters": found["parameters"],
        "gradients": found.get("gradients beside the buckets", buckets),
        "state": found.get(f"state of {name}", 0),
        "powersgd": found.get("PowerSGD: errors and Q", 0),
    }
    for what, nbytes in measured.items():
        near = abs(estimated[what] - nbytes) <= WITHIN * nbytes
        agree(group, near, f"{what}: estimated {estimated[what]}, measured {nbytes}")


def test_unknown_names_are_refused(estimates):
    for wrong, words in (({"optimizer": "lion"}, "optimizers are"), ({"partition": "x"}, "part")):
        with pytest.raises(ValueError, match=words):
            estimates.estimate([(2, 2)], estimates.Training(2, **wrong))
