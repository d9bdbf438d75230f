"""Remote modules on the next worker: calls, parameters, states, serialisation of handles."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from mpidist.nn import RemoteModule, remote
from mpidist.nn.remote_module import REFUSED
from mpidist.rpc import api
from tests.nn.nets import Named, net, no_module
from tests.rpc.limits import soon
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


class Hybrid(nn.Module):
    def __init__(self, child):
        super().__init__()
        self.here = nn.Linear(2, 2)
        self.there = child


class Twice(RemoteModule):
    def twice(self, x):
        return 2 * self(x)


def is_training(rref):
    return rref.local_value().training


def weight_sum(rref):
    return sum(float(p.detach().sum()) for p in rref.local_value().parameters())


def use(module, x):
    """Use a received module by all kinds of calls, including torch's own."""
    a, b, c = module(x), module.forward(x), module.forward_async(x).wait()
    return (
        torch.equal(a, b) and torch.equal(a, c),
        a,
        dict(module.__dict__).keys() >= {"on", "module_rref"},
        repr(module),
    )


def give_back(module):
    return module


def own_weak(rref):
    _alive.append(weakref.ref(rref.local_value()))


def is_gone():
    return all(reference() is None for reference in _alive)


_alive: list = []


def test_forward_runs_there_with_keywords_and_nested_results(workers, to):
    module = RemoteModule(f"{to}/cpu", Named, (3,), {"bias": False})
    x = torch.randn(2, 3)
    rest = ({"a": x}, 4)
    expected = (
        nn.functional.linear(x, dict(module.named_parameters())["linear.weight"].to_here()) * 2
    )
    for result in (
        module(x, scale=2, rest=rest),
        module.forward(x, scale=2, rest=rest),
        module.forward_async(x, scale=2, rest=rest).wait(),
    ):
        torch.testing.assert_close(result["out"], expected)
        assert (
            result["training"] is True
            and torch.equal(result["rest"][0]["a"], x)
            and result["rest"][1] == 4
        )
    with pytest.raises(ZeroDivisionError, match="scale is 0"):
        module(x, scale=0)
    with pytest.raises(ZeroDivisionError, match="scale is 0"):
        module.forward_async(x, scale=0).wait()


@pytest.mark.parametrize("place", ["{to}", "rank:{rank}", "rank:{rank}/cpu", "cpu"])
def test_places(group, workers, to, place):
    rank = (group.rank + 1) % group.size
    module = RemoteModule(place.format(to=to, rank=rank), net)
    owner = group.rank if place == "cpu" else rank
    assert module.get_module_rref().owner().id == owner
    assert module.get_module_rref() is module.module_rref and module(torch.ones(2, 3)).shape == (
        2,
        2,
    )


def test_what_goes_wrong_there_is_raised_at_the_first_use(workers, to):
    with pytest.raises(
        ValueError,
        match=r"returns an instance of <class nn.Module>, but it returned a <class 'int'>",
    ):
        RemoteModule(to, no_module).forward()
    with pytest.raises(TypeError, match="size"):
        RemoteModule(to, Named)(torch.ones(1))
    with pytest.raises(MpidistError, match="could not find destination 'nobody'"):
        RemoteModule("nobody/cpu", net)


def test_without_rpc_it_is_refused():
    assert not api._is_current_rpc_agent_set()
    with pytest.raises(MpidistError, match="only works in RPC"):
        RemoteModule("worker0/cpu", net)


def test_operations_are_checked(workers, to):
    module = RemoteModule(to, net)
    with pytest.raises(ValueError, match=r"one of create, forward.*; got 'delete'"):
        rpc.rpc_sync(to, remote.execute, ("delete", module.module_rref))
    with pytest.raises(ValueError, match=r"refers to a int and to no nn.Module"):
        rpc.rpc_sync(
            to, remote.execute, (remote.FORWARD, rpc.remote(to, no_module), "cpu", False, (), {})
        )


def test_parameters_are_references_in_the_modules_order(workers, to):
    module, twin = RemoteModule(to, net), net()
    names = [name for name, _ in twin.named_parameters()]
    assert [name for name, _ in module.named_parameters()] == names
    assert [name for name, _ in module.named_parameters(prefix="m")] == [
        f"m.{name}" for name in names
    ]
    for found in (
        module.remote_parameters(),
        list(module.parameters()),
        [rref for _, rref in module.named_parameters()],
    ):
        assert all(rref.owner_name() == to for rref in found)
        for rref, parameter in zip(found, twin.parameters(), strict=True):
            value = rref.to_here()
            assert torch.equal(value, parameter) and value.requires_grad
    assert module.remote_parameters(recurse=False) == [] == list(module.parameters(recurse=False))
    shared = RemoteModule(to, Named, (2,))
    assert [name for name, _ in shared.named_parameters(remove_duplicate=False)] == [
        f"{name}.{kind}" for name in ("linear", "again") for kind in ("weight", "bias")
    ]
    assert len(shared.remote_parameters()) == 2


def test_train_and_eval_reach_the_module_and_return_the_handle(workers, to):
    module = RemoteModule(to, net)
    rref = module.get_module_rref()
    for change, mode in (
        (module.eval, False),
        (module.train, True),
        (lambda: module.train(False), False),
    ):
        assert change() is module and module.training is mode
        assert rpc.rpc_sync(to, is_training, (rref,)) is mode
    with pytest.raises(ValueError, match="expected to be boolean"):
        module.train(1)


def test_state_goes_to_a_plain_module_and_back(workers, to):
    module, plain = RemoteModule(to, net), net()
    state = module.state_dict()
    assert list(state) == list(plain.state_dict()) and all(
        not value.requires_grad for value in state.values()
    )
    assert {name: entry["version"] for name, entry in state._metadata.items()} == {
        name: entry["version"] for name, entry in plain.state_dict()._metadata.items()
    }
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(3)
    sent = plain.state_dict(keep_vars=True)
    assert module.load_state_dict(sent) == torch.nn.modules.module._IncompatibleKeys([], [])
    assert rpc.rpc_sync(to, weight_sum, (module.get_module_rref(),)) == pytest.approx(
        sum(float(p.detach().sum()) for p in plain.parameters())
    )
    plain.load_state_dict(state)
    torch.testing.assert_close(plain.state_dict(), net().state_dict())
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    module.load_state_dict(torch.load(saved), assign=True)
    torch.testing.assert_close(dict(module.state_dict()), dict(state))


def test_keys_and_shapes_that_do_not_fit_are_named(workers, to):
    module = RemoteModule(to, net)
    state = module.state_dict()
    del state["0.bias"]
    state["9.bias"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"0.bias".*Unexpected key.*"9.bias"'):
        module.load_state_dict(state)
    found = module.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0.bias"], ["9.bias"])
    with pytest.raises(RuntimeError, match=rf"on {to}: size mismatch for 0.weight"):
        module.load_state_dict({"0.weight": torch.ones(7)}, strict=False)


def test_inside_another_module_it_is_a_leaf(workers, to):
    hybrid = Hybrid(RemoteModule(to, net))
    assert [name for name, _ in hybrid.named_parameters()] == ["here.weight", "here.bias"]
    assert [name for name, _ in hybrid.named_modules()] == ["", "here", "there"]
    state = hybrid.state_dict()
    assert set(state) == {
        "here.weight",
        "here.bias",
        *(f"there.{name}" for name in net().state_dict()),
    }
    state["there.0.bias"] = torch.full((4,), 5.0)
    hybrid.load_state_dict(state)
    assert torch.equal(hybrid.there.state_dict()["0.bias"], torch.full((4,), 5.0))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: .*"there.0.bias"'):
        hybrid.load_state_dict(
            {name: value for name, value in state.items() if name != "there.0.bias"}
        )
    with pytest.raises(RuntimeError, match=rf"there\.\* on {to}: size mismatch for 0.bias"):
        hybrid.load_state_dict({**state, "there.0.bias": torch.ones(9)})
    hybrid.eval()
    assert rpc.rpc_sync(to, is_training, (hybrid.there.get_module_rref(),)) is False
    hybrid.double()
    assert (
        hybrid.here.weight.dtype == torch.float64
        and hybrid.there.state_dict()["0.bias"].dtype == torch.float32
    )
    assert f"(there): RemoteModule(on='{to}', device='cpu')" in repr(hybrid)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_act_on_the_handle_is_refused(workers, to, name):
    with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
        getattr(RemoteModule(to, net), name)()


def test_torch_refuses_the_same_and_what_we_have_beyond_it():
    from torch.distributed.nn.api import remote_module as theirs

    ours_alone = {
        "parameters",
        "named_parameters",
        "state_dict",
        "load_state_dict",
        "named_modules",
        "extra_repr",
    }
    refused = set()
    for name, method in vars(theirs._RemoteModule).items():
        words = getattr(method, "__code__", None)
        if words is not None and ("_raise_not_supported" in words.co_names or name == "parameters"):
            refused.add(name)
    assert refused == set(REFUSED) | ours_alone


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_the_handle_is_not_compiled(workers, to):
    with pytest.raises(TypeError, match=r"torch.jit.script cannot compile a RemoteModule"):
        torch.jit.script(RemoteModule(to, net))


def test_it_travels_by_rpc_and_shares_the_module(group, workers, to):
    module = RemoteModule(workers[0], net)
    x = torch.randn(2, 3)
    module.eval()
    same, result, has_attributes, words = rpc.rpc_sync(to, use, (module, x))
    assert (
        same
        and has_attributes
        and torch.equal(result, module(x))
        and "RemoteModule(on='worker0'" in words
    )
    back = rpc.rpc_sync(to, give_back, ([module],))[0]
    assert type(back) is RemoteModule and (back.on, back.device) == ("worker0", "cpu")
    assert torch.equal(back(x), module(x))
    back.train()
    assert rpc.rpc_sync(workers[0], is_training, (module.get_module_rref(),)) is True


def test_what_users_add_to_it_does_not_travel(workers, to):
    module = RemoteModule(to, net)
    module.note = 3
    with pytest.warns(UserWarning, match="attribute 'note' of a RemoteModule is not sent with it"):
        back = rpc.rpc_sync(to, give_back, (module,))
    assert not hasattr(back, "note")


def test_a_class_of_the_users_stays_one(workers, to):
    module = rpc.rpc_sync(to, give_back, (Twice(to, nn.Identity),))
    assert type(module) is Twice and torch.equal(module.twice(torch.ones(2)), torch.full((2,), 2.0))


def test_a_second_handle_of_a_module(workers, to):
    module = RemoteModule(to, net)
    other = RemoteModule.init_from_module_rref(to, module.get_module_rref())
    far = rpc.rpc_sync(to, RemoteModule.init_from_module_rref, (to, module.get_module_rref()))
    x = torch.randn(2, 3)
    module.eval()
    assert torch.equal(module(x), other(x)) and torch.equal(module(x), far(x))
    other.load_state_dict(
        {name: torch.zeros_like(value) for name, value in other.state_dict().items()}
    )
    assert torch.equal(module(x), torch.zeros(2, 2)) and torch.equal(far(x), torch.zeros(2, 2))


def test_other_pickles_refuse_it(workers, to):
    module = RemoteModule(to, net)
    for attempt in (
        lambda: pickle.dumps(module),
        lambda: torch.save(module, io.BytesIO()),
        lambda: copy.copy(module),
    ):
        with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
            attempt()


def test_the_module_goes_with_its_last_handle(group, workers, to):
    gc.disable()  # no cycle may keep the module
    try:
        module = RemoteModule(to, net)
        module(torch.ones(2, 3))
        other = rpc.rpc_sync(to, give_back, (module,))
        rpc.rpc_sync(to, own_weak, (module.get_module_rref(),))
        del module, other
        # A thread there may still process the last message.
        gone = soon(lambda: rpc.rpc_sync(to, is_gone))
        agree(group, gone, "the module is still there")
    finally:
        gc.enable()
    _alive.clear()


def test_a_worker_with_a_list_serves_what_it_names(group):
    rpc.init_rpc(
        f"worker{group.rank}",
        group=group,
        allowed=["mpidist.nn.remote.execute", "tests.nn.nets.Named", "tests.nn.test_remote_module"],
    )
    to = f"worker{(group.rank + 1) % group.size}"
    module = RemoteModule(to, Named, (3,))
    assert module(torch.ones(1, 3))["out"].shape == (1, 3)
    assert isinstance(rpc.rpc_sync(to, give_back, (module,)), RemoteModule)
    with pytest.raises(MpidistError, match="not in the list of what this worker allows"):
        RemoteModule(to, nn.Linear, (3, 3))(torch.ones(3))
    with pytest.raises(MpidistError, match="not in the list of what this worker allows"):
        RemoteModule(to, net)(torch.ones(3))
    del module
    rpc.shutdown()
