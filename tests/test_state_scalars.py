"""Scalars of a loaded state: the bits that were saved, in bfloat16 too."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mpidist import checkpoint, state_scalars
from mpidist.optim.grad_attribute import GradAttributeOptimizer
from mpidist.zero.optimizer import OSS
from tests.tools.support import agree

SHAPES = [(5, 7), (), (3,)]
KINDS = [
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 1e-2}),
    (torch.optim.Adam, {"lr": 0.01}),
]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)


def parameters():
    generator = torch.Generator().manual_seed(2)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES
    ]


def train(optimizer, params, steps):
    for step in steps:
        for number, parameter in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()


def bits(state):
    """Return dtype and value of each tensor."""
    return {
        number: {name: (value.dtype, value.tolist()) for name, value in held.items()}
        for number, held in state.items()
    }


def resumed(source, params, target, others, load):
    """Load, and return whether state and the next steps are those of the source."""
    train(source, params, range(3))
    given = copy.deepcopy(source.state_dict())
    with torch.no_grad():
        for one, other in zip(others, params, strict=True):
            one.copy_(other)
    load(given)
    ok = bits(target.state_dict()["state"]) == bits(given["state"])
    train(source, params, range(3, 5))
    train(target, others, range(3, 5))
    return ok and all(map(torch.equal, params, others))


@by_kind
def test_scalars_are_restored_after_torchs_load(kind):
    made, settings = kind
    params, others = parameters(), parameters()
    source, target = made(params, **settings), made(others, **settings)

    def load(given):
        target.load_state_dict(given)
        state_scalars.restore(target, given)

    assert resumed(source, params, target, others, load)


def test_torch_itself_rounds_them():
    """If this fails, torch keeps them, and ``state_scalars`` can go."""
    params, others = parameters(), parameters()
    source, target = torch.optim.NAdam(params), torch.optim.NAdam(others)
    train(source, params, range(3))
    target.load_state_dict(source.state_dict())
    assert target.state[others[0]]["mu_product"].dtype == torch.bfloat16


@by_kind
def test_an_owner_of_remote_parameters_loads_them(kind):
    made, settings = kind
    params, others = parameters(), parameters()
    source, owner = made(params, **settings), GradAttributeOptimizer(made, others, **settings)
    assert resumed(source, params, owner._optimizer, others, owner.load_state_dict)


@pytest.mark.mpi(min_size=1)
@by_kind
@pytest.mark.parametrize("way", ["whole", "rank-local"])
def test_the_sharded_optimizer_loads_them(group, kind, way):
    made, settings = kind
    params, others = parameters(), parameters()
    source, target = (OSS(each, made, group, **settings) for each in (params, others))
    train(source, params, range(3))
    wanted = copy.deepcopy(source.state_dict(all_ranks=True))
    with torch.no_grad():
        for one, other in zip(others, params, strict=True):
            one.copy_(other)
    given = wanted if way == "whole" else source.rank_local_state_dict()
    target.load_state_dict(given)
    ok = bits(target.state_dict(all_ranks=True)["state"]) == bits(wanted["state"])
    train(source, params, range(3, 5))
    train(target, others, range(3, 5))
    agree(group, ok and all(map(torch.equal, params, others)))


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks: rank 0's."""
    return world.broadcast_object(str(tmp_path), 0)


@pytest.mark.mpi(min_size=1)
@pytest.mark.usefixtures("default_group")
@by_kind
@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_a_distributed_checkpoint_holds_them(group, folder, kind, partition):
    made, settings = kind
    params, others = parameters(), parameters()
    source, target = (
        OSS(each, made, group, partition=partition, **settings) for each in (params, others)
    )
    train(source, params, range(3))
    dcp.save({"optimizer": source.sharded_state_dict()}, checkpoint_id=folder)
    write(others, params)
    content = {"optimizer": target.sharded_state_dict()}
    dcp.load(content, checkpoint_id=folder)
    target.load_sharded_state_dict(content["optimizer"])
    states = [bits(one.state_dict(all_ranks=True)["state"]) for one in (target, source)]
    train(source, params, range(3, 5))
    train(target, others, range(3, 5))
    agree(group, states[0] == states[1] and all(map(torch.equal, params, others)))


@pytest.mark.mpi(min_size=1)
@by_kind
@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_of_the_training_holds_them(group, folder, kind, sharded):
    made, settings = kind
    models = [torch.nn.ParameterList(parameters()) for _ in range(2)]
    source, target = (
        OSS(model, made, group, **settings) if sharded else made(model, **settings)
        for model in models
    )
    train(source, models[0], range(3))
    checkpoint.save(folder, 3, model=models[0], optimizer=source, group=group)
    checkpoint.load(folder, model=models[1], optimizer=target, group=group)
    states = [
        bits((one.state_dict(all_ranks=True) if sharded else one.state_dict())["state"])
        for one in (target, source)
    ]
    train(source, models[0], range(3, 5))
    train(target, models[1], range(3, 5))
    ok = states[0] == states[1] and all(map(torch.equal, *models))
    agree(group, ok)


def write(targets, sources):
    """Write parameters, as loading a model does."""
    with torch.no_grad():
        for one, other in zip(targets, sources, strict=True):
            one.copy_(other)


def test_what_torch_has_loaded_as_it_was_is_left_alone():
    parameter = torch.ones(2)
    number, kept = torch.tensor(0.25), torch.tensor(0.5)
    loaded = {"mu_product": kept, "eta": 0.5}
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}], state={parameter: loaded})
    saved = {"mu_product": number, "eta": torch.tensor(1.0)}
    given = {"param_groups": [{"params": [0]}], "state": {0: saved}}
    state_scalars.restore(optimizer, given)
    assert loaded["mu_product"] is kept and loaded["eta"] == 0.5


def test_a_loaded_scalar_shares_no_memory_with_what_was_saved():
    parameter, saved = torch.ones(2, dtype=torch.bfloat16), torch.tensor(0.25)
    loaded = {"mu_product": saved.to(torch.bfloat16)}
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}], state={parameter: loaded})
    given = {"param_groups": [{"params": [0]}], "state": {0: {"mu_product": saved}}}
    state_scalars.restore(optimizer, given)
    loaded["mu_product"].mul_(2)
    assert loaded["mu_product"].dtype is torch.float32 and loaded["mu_product"].item() == 0.5
    assert saved.item() == 0.25
