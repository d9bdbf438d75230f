"""Functions of ``mpidist.optim.local`` with wrong arguments: refused, and nothing changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.optim import local
from mpidist.optim.local_optimizer import LocalOptimizer
from mpidist.rpc.rref import RRef
from tests.optim import owners
from tests.tools.transfers import CUDA, counted

pytestmark = pytest.mark.mpi(min_size=1)

REFUSED = (TypeError, ValueError, RuntimeError)
TYPES = [
    None,
    True,
    1,
    1.5,
    "1",
    b"1",
    [1],
    (1,),
    {1: 1},
    {1},
    torch.ones(1),
    SimpleNamespace(local_value=lambda: 1),
]


@pytest.fixture
def parameter(workers):
    return RRef(owners.parameter([1.0, 2.0, 3.0]))


@pytest.fixture
def optimizer(parameter):
    """Return a reference to an optimizer of one parameter after a step."""
    made = local.make("Adam", True, [([parameter], {"lr": 0.5})], (), {"betas": (0.5, 0.6)})[0]
    made.local_value().optimizer.step([torch.ones(3)])
    return made


def untouched(optimizer):
    """Return parameters, groups and state, which a refused call must not change."""
    found = optimizer.local_value()
    state = found.optimizer.state_dict()
    values = [own.tolist() for own in found.parameters]
    return repr((values, state, found.counts))


def refused(optimizer, call, *arguments, error=REFUSED, match=None):
    before = untouched(optimizer)
    with pytest.raises(error, match=match):
        call(*arguments)
    assert untouched(optimizer) == before


@pytest.mark.parametrize("reference", TYPES)
def test_references_that_are_none(optimizer, reference):
    refused(optimizer, local.step, reference, 1, {}, error=TypeError)
    refused(optimizer, local.add_group, reference, [], {}, error=TypeError)
    refused(optimizer, local.remove_group, reference, error=TypeError)
    refused(optimizer, local.state, reference, error=TypeError)
    refused(optimizer, local.load_state, reference, {}, [], error=TypeError)
    refused(optimizer, local.gradient_norms, reference, 1, 2.0, error=TypeError)
    refused(optimizer, local.scale_gradients, reference, 1, 2.0, error=TypeError)
    refused(optimizer, local.add_group, optimizer, [reference], {}, error=TypeError)
    refused(
        optimizer, local.make, "SGD", True, [([reference], {})], (), {"lr": 1.0}, error=TypeError
    )


def test_references_to_something_else(optimizer, parameter):
    class Like:
        """Class with an optimizer's attributes."""

        optimizer, parameters, counts = None, [], []

    for value in [Like(), optimizer.local_value().optimizer, torch.ones(1), None]:
        for call, *rest in [
            (local.step, 1, {}),
            (local.state,),
            (local.load_state, {}, []),
            (local.remove_group,),
        ]:
            refused(
                optimizer,
                call,
                RRef(value),
                *rest,
                error=TypeError,
                match="no optimizer of this worker",
            )
    refused(optimizer, local.add_group, optimizer, [RRef("text")], {}, error=TypeError)


@pytest.mark.mpi(min_size=2)
def test_references_of_another_worker(group, workers, parameter):
    there = rpc.remote(workers[(group.rank + 1) % group.size], owners.parameter, args=([1.0],))
    with pytest.raises(TypeError, match="of its own worker"):
        local.make("SGD", True, [([there], {})], (), {"lr": 1.0})
    del there
    group.barrier()


@pytest.mark.parametrize(
    "arguments",
    [
        (None, True),
        (1, True),
        ("SGD", False),
        ("eval", True),
        ("__class__", True),
        (b"SGD", True),
        (torch.nn.Linear, False),
        (int, False),
        (owners.module, False),
    ],
)
def test_classes_that_are_no_optimizers(parameter, arguments):
    with pytest.raises(REFUSED):
        local.make(*arguments, [([parameter], {})], (), {"lr": 1.0})


def test_the_first_group_stays(optimizer):
    refused(optimizer, local.remove_group, optimizer, error=ValueError)


def state_of(optimizer, **changed):
    found = local.state(optimizer)
    found[0].update(changed)
    return found


@pytest.mark.parametrize(
    "values",
    [
        # torch's fused kernels would read and write beyond the memory of these.
        {"exp_avg": torch.zeros(1)},
        {"exp_avg": torch.zeros(())},
        {"exp_avg_sq": torch.zeros(0)},
        {"max_exp_avg_sq": torch.zeros(2)},
        {"exp_avg": torch.zeros(3, 1)},
        {"step": torch.zeros(3)},
        {"step": torch.zeros(0)},
    ],
)
def test_states_of_another_shape(optimizer, values):
    settings = optimizer.local_value().settings()
    refused(
        optimizer,
        local.load_state,
        optimizer,
        state_of(optimizer, **values),
        settings,
        error=ValueError,
        match="of shape",
    )


def test_what_is_right_is_taken(given, optimizer, parameter):
    settings = optimizer.local_value().settings()
    local.load_state(optimizer, state_of(optimizer), settings)
    owners.give(parameter, 1, torch.ones(3))
    local.step(optimizer, 1, {0: {"lr": 0.125, "initial_lr": 0.5}})
    assert optimizer.local_value().settings()[0]["lr"] == 0.125
    assert local.gradient_norms(optimizer, 1, 2).tolist() == pytest.approx([3**0.5])


@pytest.fixture
def attribute_optimizer(parameter):
    """Return references to optimizers that read ``.grad``, without and with a fused kernel."""
    made = [
        local.make(torch.optim.Adam, False, [([parameter], {})], (), {"lr": 0.5, "fused": on})[0]
        for on in (None, True)
    ]
    for each in made:
        each.local_value().optimizer.step([torch.ones(3)])
    return made


@pytest.mark.parametrize("switch", ["fused", "foreach", "capturable", "differentiable"])
def test_kernels_are_switched_on_by_no_message(
    given, optimizer, attribute_optimizer, parameter, switch
):
    owners.give(parameter, 1, torch.ones(3))
    for each in (optimizer, attribute_optimizer[0]):
        settings = each.local_value().settings()[0]
        for call, *rest in [
            (local.step, 1, {0: {"lr": 0.25, switch: True}}),
            (local.load_state, local.state(each), [{**settings, "lr": 0.25, switch: True}]),
            (local.add_group, [RRef(owners.parameter([1.0]))], {switch: True}),
        ]:
            refused(each, call, each, *rest, error=ValueError, match=f"'{switch}' is switched on")


@pytest.mark.parametrize(
    "values",
    [
        {"exp_avg": torch.zeros(1)},
        {"exp_avg_sq": torch.zeros(0)},
        {"exp_avg": torch.zeros(6)},
        {"step": torch.zeros(0)},
    ],
)
def test_states_that_the_fused_kernel_does_not_take(attribute_optimizer, values):
    fused = attribute_optimizer[1]
    settings = fused.local_value().settings()
    for off in (settings, [{**settings[0], "fused": None}]):
        refused(
            fused,
            local.load_state,
            fused,
            state_of(fused, **values),
            off,
            error=ValueError,
            match="of shape",
        )


def test_an_optimizer_made_with_the_fused_kernel_keeps_it(given, attribute_optimizer, parameter):
    owners.give(parameter, 1, torch.ones(1).expand(3))
    fused = attribute_optimizer[1]
    local.load_state(fused, local.state(fused), fused.local_value().settings())
    local.step(fused, 1, {0: {"lr": 0.25, "fused": True}})
    local.add_group(fused, [RRef(owners.parameter([1.0]))], {"fused": True})
    assert [group["fused"] for group in fused.local_value().settings()] == [True, True]


def test_steps_counted_on_a_device_are_copied_to_the_host_together():
    with counted() as counts:
        state = {
            place: {"step": torch.ones((), device=CUDA), "seen": [torch.ones(2), ("text", place)]}
            for place in range(20)
        }
        copy = local._copied(state)
        assert counts.down == ["_to_copy"] and copy[3]["step"].device.type == "cpu"
        assert copy[3]["seen"][1] == ("text", 3) and copy[3]["seen"] is not state[3]["seen"]


def test_a_state_from_a_message_has_the_parameters_strides_or_is_refused():
    """Fused kernels read as many elements as the parameter has, from the first one on."""
    parameters = [torch.nn.Parameter(torch.zeros(50)), torch.nn.Parameter(torch.zeros(3))]
    made = LocalOptimizer.__new__(LocalOptimizer)
    loaded = []
    made.parameters, made.counts = parameters, [[1, 1]]
    made.optimizer = SimpleNamespace(load_state_dict=loaded.append, param_groups=[{"params": []}])
    repeated = torch.as_strided(torch.ones(50), (50,), (0,), 49)
    made.load({0: {"exp_avg": repeated, "step": 1}}, [{}])
    (state,) = (one["state"] for one in loaded)
    assert state[0]["exp_avg"].stride() == (1,) and state[0]["exp_avg"].tolist() == [1.0] * 50
    with pytest.raises(ValueError, match=r"no parameters of the numbers \[99\]"):
        made.load({99: {"x": torch.ones(2)}}, [{}])
    with pytest.raises(LookupError, match="no group -1"):
        made.change({-1: {"lr": 9.0}})
    assert len(loaded) == 1
