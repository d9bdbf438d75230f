"""ZeroRedundancyOptimizer: torch's names and meanings, hooks without step(), errors."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed.optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs

from mpidist import optim
from mpidist.ddp.hooks.default import allreduce_hook, fp16_compress_wrapper
from mpidist.errors import DisagreementError
from mpidist.optim import ZeroRedundancyOptimizer, hook_with_zero_step
from mpidist.zero.shards.partition import BALANCED, Owners
from tests.tools.support import agree, raises_on_all
from tests.zero.models import SETTINGS, Model, backward, trained, unequal_parameters, wrapped

pytestmark = pytest.mark.mpi


def unordered(state, bucket):
    """Average a bucket in a hook without ``is_in_order``: between nodes on the group's thread."""
    return fp16_compress_wrapper(allreduce_hook)(state, bucket)


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("in_thread", [False, True])
def test_the_hook_takes_the_step(group, in_thread, monkeypatch):
    """Steps from the first iteration on; added groups and state dicts work as without hooks."""
    monkeypatch.setattr(type(group), "is_single_node", not in_thread)
    wrong = []
    for kind, hook, makes in (
        ("mpidist", allreduce_hook, hook_with_zero_step),
        ("mpidist", unordered, optim.hook_with_zero_step_interleaved),
        ("torch", torchs.allreduce_hook, hook_with_zero_step),
    ):
        its_optim, settings = SETTINGS["Adam"]
        plain, sharded = (
            wrapped(group, kind, Model(), find_unused_parameters=True) for _ in range(2)
        )
        first, *more = ([p for p in ddp.parameters()] for ddp in (plain, sharded))
        (second,) = more
        its = its_optim(first[:3], **settings)
        zero = ZeroRedundancyOptimizer(second[:3], its_optim, overlap_with_ddp=True, **settings)
        for optimizer, parameters in ((its, first), (zero, second)):
            optimizer.add_param_group({"params": parameters[3:], "lr": 0.02})
        state = group if kind == "mpidist" else None
        plain.register_comm_hook(state, hook)
        sharded.register_comm_hook(state, makes(hook, sharded, zero))
        for number in range(4):  # one by one: the twins' schedulers restart
            trained(group, plain, its, [number])
            trained(group, sharded, zero, [number], True)
            if names := unequal_parameters(sharded, plain):
                wrong.append(f"{kind} {number}: {names}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if zero.step() is not None or not any(
                "hook_with_zero_step" in str(each.message) for each in caught
            ):
                wrong.append(f"{kind}: step() in addition to the hook")
        if names := unequal_parameters(sharded, plain):
            wrong.append(f"{kind} after step(): {names}")
        zero.consolidate_state_dict(to=group.size - 1)
        if group.rank == group.size - 1:
            saved, expected = zero.state_dict(), its.state_dict()
            if (
                saved["param_groups"] != expected["param_groups"]
                or saved["state"].keys() != expected["state"].keys()
            ):
                wrong.append(f"{kind}: state dict")
    agree(group, not wrong, "; ".join(wrong))


def test_arguments(group):
    """All ranks raise, also if one rank's argument alone is wrong."""
    p = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]

    def make(params, **options):
        return lambda: ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1, **options)

    raises_on_all(group, TypeError, make(p[0]))
    raises_on_all(group, TypeError, make(1), "int")
    raises_on_all(group, ValueError, make([]), "empty")
    raises_on_all(group, TypeError, make([p[0], {"params": [p[1]]}]), "dict")
    raises_on_all(group, TypeError, make([p[0], 1]), "int")
    raises_on_all(group, ValueError, make([torch.eye(3).to_sparse()]), "dense")
    if group.size > 1:
        mine = group.rank == 0
        raises_on_all(
            group, ValueError if mine else DisagreementError, make([] if mine else p), "empty"
        )
    zero = make((q for q in p), parameters_as_bucket_view=True)()
    assert (
        zero.parameters_as_bucket_view
        and zero.process_group is group
        and zero.join_device == torch.device("cpu")
    )
    named = make([("weight", p[0])])()
    named.consolidate_state_dict(-1)
    assert named.state_dict()["param_groups"][0]["param_names"] == ["weight"]
    model = Model()
    without = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group, lr=0.1)
    raises_on_all(
        group,
        ValueError,
        lambda: hook_with_zero_step(allreduce_hook, model, without),
        "overlap_with_ddp=True",
    )
    backward(model, 0, 0)
    before = model.last.weight.detach().clone()
    without.step()
    agree(group, not torch.equal(before, model.last.weight), "no step")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parameters_are_divided_as_torch_divides_them(ranks):
    """Over random sizes, with equal ones among them, in one to three groups."""
    theirs = torch.distributed.optim.ZeroRedundancyOptimizer
    random.seed(ranks)
    for _ in range(30):
        sizes = [
            [random.choice((1, 7, 64, 64, 1000, random.randint(1, 5000))) for _ in range(number)]
            for number in (random.randint(1, 9) for _ in range(random.randint(1, 3)))
        ]
        params = [[torch.zeros(size, requires_grad=True) for size in group] for group in sizes]
        bare = object.__new__(theirs)
        bare.world_size, bare._partition_parameters_cache = ranks, []
        bare.param_groups = [{"params": group} for group in params]
        expected = {
            id(parameter): rank
            for rank, groups in enumerate(bare._partition_parameters())
            for group in groups
            for parameter in group["params"]
        }
        ours = Owners(BALANCED, torch.numel, ranks)
        for group in params:
            ours.add(group)
        assert ours == [expected[id(p)] for group in params for p in group]


def test_the_partition_is_torchs_by_default(group):
    sizes = [10, 30, 20, 30, 5]
    params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1)
    expected = Owners(BALANCED, torch.numel, group.size)
    expected.add(params)
    agree(group, list(zero._shards.owners) == list(expected))
    greedy = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, lr=0.1, partition="greedy")
    expected = Owners("greedy", torch.numel, group.size)
    expected.add(params)
    agree(group, list(greedy._shards.owners) == list(expected))
