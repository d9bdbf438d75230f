"""Overlapped gathers: every read of a parameter gets its new value; no hook is left."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mpidist.ddp.hooks.default import allreduce_hook
from mpidist.zero.flat_buffers import _sliced
from mpidist.zero.optimizer import OSS
from mpidist.zero.overlap import Gather, PendingGathers
from tests.support import agree, raises_on_all
from tests.zero.models import Model, backward, trained, unequal_parameters, wrapped


class LateWork:
    """Work that writes a parameter's new value in ``wait``, like a gather that completes then."""

    def __init__(self, parameter):
        self.parameter = parameter
        self.waits = 0

    def wait(self):
        self.waits += 1
        with torch.no_grad():
            self.parameter.fill_(2.0)


class EndingWork(LateWork):
    """Work that can be completed before ``wait``."""

    has_ended = False

    def is_completed(self):
        return self.has_ended


@pytest.fixture
def late():
    """Two parameters of value 1, each with a pending bucket; checks that no hook is left."""
    before = _get_current_function_mode_stack()
    parameters = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    works = [LateWork(parameter) for parameter in parameters]
    pending = PendingGathers()
    pending.begin([Gather([p], [w]) for p, w in zip(parameters, works, strict=True)])
    yield pending, parameters, works
    pending.wait()
    assert _get_current_function_mode_stack() == before and not modules._global_forward_pre_hooks
    assert not modules._global_forward_hooks


READS = {
    "function": lambda p: F.linear(torch.eye(2), p),
    "method": lambda p: p.detach(),
    "operator": lambda p: p @ torch.eye(2),
    "list": lambda p: torch.stack([torch.ones(2, 2), p])[1],
    "keyword": lambda p: F.linear(torch.eye(2), weight=p),
    "data": lambda p: p.data,
    "alias": lambda p: torch.clone(p.alias),
    "copy": copy.deepcopy,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "average": lambda p: torch.zeros(2, 2).lerp_(p.detach(), 1.0),
    "call": lambda p: torch.func.functional_call(
        torch.nn.Linear(2, 2, bias=False), {"weight": p}, (torch.eye(2),)
    ).t(),
    "module": lambda p: _module_of(p)(torch.eye(2)).t(),
    "state": lambda p: _module_of(p).state_dict()["weight"],
    "scripted": lambda p: torch.jit.script(_module_of(p))(torch.eye(2)).t(),
    "thread": lambda p: _in_thread(lambda: _module_of(p)(torch.eye(2)).t()),
    "own function": lambda p: _Own.apply(p),
}


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _module_of(parameter):
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight = parameter
    return module


def _in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("way", READS)
def test_a_read_waits_for_its_own_bucket(late, way):
    _, parameters, works = late
    parameters[0].alias = parameters[0].__dict__.setdefault("alias", None)
    if way == "alias":  # memory that was known before, by another tensor
        with torch._C.DisableTorchFunction():
            parameters[0].alias = parameters[0].detach()
    assert torch.equal(READS[way](parameters[0]), torch.full((2, 2), 2.0))
    waits_for_all = way in ("scripted", "thread")
    assert works[0].waits == 1 and works[1].waits == int(waits_for_all)


def test_what_is_no_read_does_not_wait(late):
    pending, parameters, works = late
    p = parameters[0]
    p.grad = torch.ones(2, 2)
    assert (
        p.grad is not None
        and p.shape == (2, 2)
        and p.dtype is torch.float32
        and p.requires_grad
        and not p.is_cuda
    )
    assert p.size() == (2, 2) and p.numel() == 4 and p._version == 0 and {p: 1}[p] == 1
    torch.optim.SGD(parameters, lr=0.1).zero_grad()
    assert (torch.ones(2) + 1).sum() == 4
    assert works[0].waits == 0 and pending.is_open


def test_modes_come_and_go_above(late):
    """A user's mode is entered before the end; a default device must stay at the bottom."""
    pending, parameters, works = late

    class Mine(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with torch.device("cpu"), Mine():
        pending.wait()
        assert len(_get_current_function_mode_stack()) == 2
        pending.begin([Gather([parameters[0]], [works[0]])])
    assert len(_get_current_function_mode_stack()) == 1
    assert torch.equal(parameters[0] + 0, torch.full((2, 2), 2.0)) and works[0].waits == 2
    torch.nn.Identity()(torch.ones(1))  # the next module call removes the mode
    assert not _get_current_function_mode_stack()


def test_slices_cover_a_shard():
    for low, high, count in ((0, 640, 3), (64, 192, 4), (128, 128, 2), (0, 65, 1)):
        parts = [_sliced(low, high, index, count) for index in range(count)]
        assert [element for first, end in parts for element in range(first, end)] == list(
            range(low, high)
        )
        assert not any(first % 64 for first, _ in parts)


@pytest.mark.mpi
@pytest.mark.parametrize("in_thread", [False, True])
def test_the_same_bits_as_without(group, in_thread, monkeypatch):
    """Includes averages of weights, read after the step, and steps within the backward pass."""
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    wrong = []
    chosen = [
        {"partition": "greedy"},
        {"partition": "flat"},
        {"partition": "balanced", "one_copy": True},
    ]
    for place, how in enumerate(chosen):
        results = []
        for overlap in (False, True):
            model = Model()
            ddp = wrapped(group, "mpidist", model, find_unused_parameters=True)
            oss = OSS(
                ddp.parameters(),
                torch.optim.Adam,
                group,
                overlap=overlap,
                bucket_cap_mb=0.001,
                lr=0.01,
                **how,
            )
            if place == 1:
                ddp.register_comm_hook(group, oss.stepping_hook(allreduce_hook))
            averages = copy.deepcopy(model)
            for number in range(4):
                trained(group, ddp, oss, [number])
                with torch.no_grad():
                    for one, other in zip(averages.parameters(), model.parameters(), strict=True):
                        one.lerp_(other, 0.1) if number % 2 else None
            oss.clip_grad_norm(1.0) if place != 1 else None
            oss.consolidate_state_dict(0)
            results.append((oss, model, averages))
        wrong += [
            f"{how}: {unequal_parameters(a, b)}"
            for a, b in zip(results[0][1:], results[1][1:], strict=True)
            if unequal_parameters(a, b)
        ]
        oss.wait()
        if _get_current_function_mode_stack() or modules._global_forward_pre_hooks:
            wrong.append(f"{how}: something is left")
    raises_on_all(
        group,
        ValueError,
        lambda: OSS(
            [torch.nn.Parameter(torch.ones(1))], group=group, overlap=True, bucket_cap_mb=0
        ),
        "cap",
    )
    agree(group, not wrong, "; ".join(wrong))


@pytest.mark.mpi
def test_parameters_of_a_deleted_optimizer_still_wait_for_their_gather(group):
    model = Model()
    oss = OSS(model.parameters(), torch.optim.SGD, group, overlap=True, bucket_cap_mb=0.001, lr=0.1)
    backward(model, 0, 0)
    oss.step()
    del oss
    plain = Model()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    backward(plain, 0, 0)
    optim.step()
    state = model.state_dict()
    ok = all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    agree(group, ok, "a stale value was read")
    model.train()(torch.ones(1, 6))
    agree(group, not _get_current_function_mode_stack(), "the mode is left")


class Owner:
    """Substitute of an optimizer."""


def test_gathers_of_a_deleted_optimizer_keep_nothing_alive():
    owner, parameter = Owner(), torch.nn.Parameter(torch.ones(2, 2))
    work = EndingWork(parameter)
    PendingGathers(owner).begin([Gather([parameter], [work])])
    held = weakref.ref(parameter)
    other = torch.nn.Linear(2, 2)
    for is_alive, has_ended in ((True, True), (False, False)):
        work.has_ended = has_ended
        if not is_alive:
            del owner
        other(torch.ones(2))
        assert len(_get_current_function_mode_stack()) == 1 and not work.waits, (
            is_alive,
            has_ended,
        )
    work.has_ended = True
    other(torch.ones(2))
    assert not _get_current_function_mode_stack() and not modules._global_forward_pre_hooks
    del parameter, work
    gc.collect()
    assert held() is None
