"""Remote modules and optimizers on workers with lists, without pickles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.autograd.api import _engine
from mpidist.errors import NotPlainData, WorkerErrors
from mpidist.nn import RemoteModule
from mpidist.optim import DistributedOptimizer
from mpidist.rpc.threads import interceptor
from mpidist.rpc.values import codec, pickles
from tests.nn.nets import Named, net
from tests.optim.owners import Halving
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


class Twice(RemoteModule):
    """A user-defined subclass of RemoteModule."""


def use(module, x):
    """Call a module received in a message."""
    return module(x), module.on, module.device


def give_back(module):
    return module


@pytest.fixture
def to(group, monkeypatch):
    """Start every worker with a list, and fail if RPC pickles; return the next worker's name."""
    made = []

    def no_pickle(*args, **kwargs):
        made.append(args)
        raise AssertionError("a pickle")

    for module, name in [(pickles, "dumps"), (pickles, "loads"), (codec, "encode_pickled")]:
        monkeypatch.setattr(module, name, no_pickle)
    interceptor.register(_engine)
    names = [
        "mpidist.nn.remote.execute",
        "mpidist.optim.local",
        net,
        Named,
        Halving,
        use,
        give_back,
        nn.Linear,
    ]
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=names)
    yield f"worker{(group.rank + 1) % group.size}"
    rpc.shutdown()
    interceptor.register(None)
    agree(group, not made, str(made))


def test_calls_modes_and_parameters(group, to):
    module = RemoteModule(to, Named, (3,), {"bias": False})
    x = torch.ones(2, 3)
    found = module(x, scale=2, rest=({"a": x}, 4))
    assert found["training"] and torch.equal(found["rest"][0]["a"], x) and found["rest"][1] == 4
    weight = dict(module.named_parameters())["linear.weight"].to_here()
    torch.testing.assert_close(found["out"], nn.functional.linear(x, weight) * 2)
    assert not module.train(False)(x)["training"] and not module.training
    with pytest.raises(ZeroDivisionError, match="scale is 0"):
        module.forward_async(x, scale=0).wait()
    del module
    group.barrier()


def test_states_there_and_back(group, to):
    module, own = RemoteModule(to, net), net()
    state = module.state_dict()
    own_state = own.state_dict()
    assert (
        list(state) == list(own_state)
        and state._metadata[""]
        and all(map(torch.equal, state.values(), own_state.values()))
    )
    for value in own_state.values():
        value += 1
    for assign in (False, True):
        module.load_state_dict(own_state, assign=assign)
        x = torch.randn(4, 3)
        torch.testing.assert_close(module.train(False)(x), own.eval()(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**own_state, "0.weight": torch.ones(1)})
    del module
    group.barrier()


def test_handles_as_arguments_and_results(group, to):
    module = RemoteModule(f"{to}/cpu", net)
    x = torch.ones(2, 3)
    result, on, device = rpc.rpc_sync(to, use, args=(module, x))
    assert (on, device) == (to, "cpu") and torch.equal(result, module(x))
    back = rpc.rpc_sync(to, give_back, args=([module],))[0]
    assert type(back) is RemoteModule and torch.equal(back(x), module(x))
    own = Twice(to, net)
    with pytest.raises(NotPlainData, match=r"'module'.*Twice"):
        rpc.rpc_sync(to, give_back, args=(own,))
    del module, back, own
    group.barrier()


@pytest.mark.parametrize("mode", ["fast", "smart"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Halving])
def test_training_equals_one_process(group, to, mode, kind):
    """With schedulers, clipping, a saved and loaded state; the list names the optimizer class."""
    options = {"lr": 0.25} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    # Without a normalisation, before which biases have gradients of rounding alone, and AdamW makes
    # them large.
    module, twin = RemoteModule(to, Named, (3,)), Named(3)
    twin.load_state_dict(module.state_dict())
    optimizer = DistributedOptimizer(kind, module.remote_parameters(), **options)
    theirs = kind(twin.parameters(), **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, theirs)]
    generator = torch.Generator().manual_seed(group.rank)
    for number in range(4):
        x = torch.randn(5, 3, generator=generator)
        with autograd.context() as context:
            autograd.backward(context, [module(x)["out"].square().sum()], mode=mode)
            norm = optimizer.clip_grad_norm_(context, 1.0)
            optimizer.step(context)
        theirs.zero_grad()
        twin(x)["out"].square().sum().backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 1.0))
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
        if number == 1:
            saved = optimizer.state_dict()
            theirs.load_state_dict(saved)
            optimizer.load_state_dict(theirs.state_dict())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    del module, optimizer
    group.barrier()


def test_groups_are_added_and_modules_are_optimized(group, to):
    module = RemoteModule(to, nn.Linear, (3, 2))
    optimizer = DistributedOptimizer(
        torch.optim.Adagrad, [{"params": [module.get_module_rref()], "lr": 0.5}]
    )
    other = RemoteModule(to, Named, (2,))
    optimizer.add_param_group({"params": other.remote_parameters(), "lr": 0.125})
    # On one rank the local values are the parameters themselves.
    before = [rref.to_here().clone() for rref in module.remote_parameters()]
    with autograd.context() as context:
        autograd.backward(context, [other(module(torch.ones(1, 3)))["out"].sum()])
        optimizer.step(context)
    assert all(
        not torch.equal(old, rref.to_here())
        for old, rref in zip(before, module.remote_parameters(), strict=True)
    )
    del module, other, optimizer
    group.barrier()


def test_what_is_not_in_the_list(group, to):
    module = RemoteModule(to, net)
    with pytest.raises(WorkerErrors, match=r'"torch.optim.radam.RAdam" may not be named'):
        DistributedOptimizer(torch.optim.RAdam, module.remote_parameters())
    with pytest.raises(RuntimeError, match="not in the list"):
        RemoteModule(to, nn.Bilinear, (1, 1, 1))(torch.ones(1))
    del module
    group.barrier()
