"""Sharded optimizer against the plain one, bit by bit; its API and errors."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpidist.errors import DisagreementError
from mpidist.zero.optimizer import OSS
from tests.tools.support import agree, calls_of_ours, raises_on_all
from tests.zero import nets

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", nets.OPTIMIZERS)
def test_bits_of_the_plain_optimizer(group, name):
    optim, settings = nets.OPTIMIZERS[name]
    parameters = nets.parameters_for(name)
    plain = optim(parameters, **settings)
    if not nets.takes_late_groups(optim, settings):
        pytest.skip(
            f"{optim.__name__} of torch {torch.__version__} does not step a group that is added "
            "later"
        )
    nets.train(plain, parameters)
    # All optimizers together cover every pair of way and partition; one optimizer covers all.
    cases = [
        (kind, nets.WAYS[(place + len(name)) % 3])
        for place, kind in enumerate(nets.partitions_of(name))
    ]
    if name == "AdamW-foreach":
        cases = [(kind, way) for kind in nets.partitions_of(name) for way in nets.WAYS]
    for kind, way in cases:
        with nets.memory(way) as chosen:
            parameters = nets.parameters_for(name)
            sharded = OSS(parameters, optim, group, partition=kind, **chosen, **settings)
            nets.train(sharded, parameters)
        wrong = nets.differences(sharded, plain)
        agree(group, not wrong, f"{kind}, {way}: {wrong}")


def sgd(group, parameters=None, **settings):
    """Return a sharded SGD over odd parameters, or over these."""
    parameters = nets.parameters_for("SGD") if parameters is None else parameters
    return OSS(parameters, torch.optim.SGD, group, **{"lr": 0.1, **settings})


def test_a_step_on_one_node_passes_few_functions(group):
    """Counts calls of ours in the calling thread.

    Two are the recorder's for each of the step and its three collectives.
    """
    parameters = nets.matrices()
    sharded = sgd(group, parameters, momentum=0.9)
    for step in range(3):
        nets.give_gradients(parameters, step)
        with calls_of_ours() as calls:
            sharded.step()
    modules = {call.split()[0] for call in calls}
    agree(group, len(calls) <= 40 and len(modules) <= 12, "\n".join(calls))


def test_positional_arguments_are_fairscales(group):
    parameters = nets.matrices()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = OSS(parameters, torch.optim.Adam, group, -1, False, False, lr=0.5)
    agree(
        group, isinstance(sharded.optim, torch.optim.Adam) and sharded.param_groups[0]["lr"] == 0.5
    )
    agree(
        group,
        (sharded.rank, sharded.world_size) == (group.rank, group.size)
        and isinstance(sharded, torch.optim.Optimizer),
    )
    for given in ((1 << 20, False, False), (-1, False, True)):
        with pytest.warns(UserWarning, match="have no effect"):
            OSS(parameters, torch.optim.SGD, group, *given, lr=0.5)
    agree(group, isinstance(OSS(parameters, group=group, lr=0.1).optim, torch.optim.SGD))


def test_a_closure_is_called_with_gradients_and_its_loss_returned(group):
    for kind, way in (("greedy", "one copy"), ("flat", "node"), ("flat", "one copy")):
        with nets.memory(way) as chosen:
            torch.manual_seed(0)
            nets_ = [torch.nn.Linear(9, 30), torch.nn.Linear(9, 30)]
            nets_[1].load_state_dict(nets_[0].state_dict())
            sharded = OSS(
                nets_[0].parameters(), torch.optim.AdamW, group, partition=kind, lr=0.1, **chosen
            )
            plain = torch.optim.AdamW(nets_[1].parameters(), lr=0.1)
            x = torch.randn(6, 9)

            def closure(net, optimizer, x=x):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                return loss

            # A faster rank would write the one copy while others still read it.
            for _ in range(12):
                losses = [
                    optimizer.step(functools.partial(closure, net, optimizer))
                    for net, optimizer in zip(nets_, (sharded, plain), strict=True)
                ]
                agree(group, torch.equal(*losses), f"{losses}")
        wrong = nets.differences(sharded, plain)
        agree(group, not wrong, wrong)


@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_a_closure_that_raises_on_one_rank_stops_the_step_on_all(group, kind):
    sharded = sgd(group, partition=kind)
    parameters = nets.all_parameters(sharded)
    nets.give_gradients(parameters, 0)
    before = [parameter.detach().clone() for parameter in parameters]

    def closure():
        if group.rank == group.size - 1:
            raise LookupError("no data")
        return torch.tensor(1.0)

    kind = LookupError if group.rank == group.size - 1 else DisagreementError
    raises_on_all(group, kind, lambda: sharded.step(closure), "no data")
    agree(group, all(map(torch.equal, parameters, before)))
    sharded.step()
    agree(group, not torch.equal(parameters[0], before[0]))


@pytest.mark.parametrize("way", nets.WAYS)
def test_a_step_that_raises_on_one_rank_ends_alike_on_all(group, way):
    """Adam refuses sparse gradients, which only the table's owner sees."""
    with nets.memory(way) as chosen:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(40, 3)) for _ in range(4)]
        sharded = OSS(parameters, torch.optim.Adam, group, lr=0.1, **chosen)
        nets.give_gradients(parameters, 0)
        owner = sharded._shards.owners[2]
        parameters[2].grad = torch.sparse_coo_tensor(
            [[1, 5]], torch.ones(2, 3), (40, 3), check_invariants=True
        )
        kind = RuntimeError if owner == group.rank else DisagreementError
        raises_on_all(group, kind, sharded.step, "sparse gradients")
        same = [group.all_gather_object(parameter.detach().clone()) for parameter in parameters]
        agree(
            group, all(torch.equal(each, held[0]) for held in same for each in held), "ranks differ"
        )
        parameters[2].grad = None
        before = parameters[0].detach().clone()
        sharded.step()
        agree(group, not torch.equal(parameters[0], before))


def test_a_sparse_gradient_of_a_cut_parameter_is_refused_and_a_whole_one_steps(group):
    for kind in ("flat", "greedy"):
        tables = [torch.nn.Embedding(50, 4, sparse=True) for _ in range(2)]
        tables[1].load_state_dict(tables[0].state_dict())
        group.broadcast(tables[0].weight.data, 0)
        tables[1].load_state_dict(tables[0].state_dict())
        sharded = OSS(tables[0].parameters(), torch.optim.SGD, group, partition=kind, lr=0.1)
        plain = torch.optim.SGD(tables[1].parameters(), lr=0.1)
        for table in tables:
            table(torch.tensor([3, 3, 7])).sum().backward()
        if kind == "flat":
            raises_on_all(group, Exception, sharded.step, "layout torch.sparse_coo")
            continue
        sharded.step()
        plain.step()
        agree(group, torch.equal(tables[0].weight, tables[1].weight))


def refused(ranks, error, words, *arguments, **settings):
    raises_on_all(ranks, error, lambda: OSS(*arguments, **settings), words)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_bad_arguments_are_refused_on_all_ranks_and_the_group_goes_on(group):
    p = nets.matrices
    on_meta = torch.nn.Parameter(torch.ones(3, device="meta"))
    sgd_class = torch.optim.SGD
    refused(group, TypeError, "momentun", p(), sgd_class, group, lr=0.1, momentun=0.9)
    refused(group, TypeError, "is a class", p(), "SGD", group)
    refused(group, TypeError, "is a class", p(), sgd_class(p(), lr=0.1), group)
    refused(group, TypeError, "needs a group of mpidist", p(), sgd_class, "group")
    refused(group, ValueError, "LBFGS", p(), torch.optim.LBFGS, group)
    half = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    refused(group, TypeError, "fp16", half, sgd_class, group, lr=0.1, wire="fp16")
    refused(group, ValueError, "wire", p(), sgd_class, group, lr=0.1, wire="int4")
    refused(
        group,
        ValueError,
        "not known to treat each element by itself",
        p(),
        torch.optim.Muon,
        group,
        partition="flat",
        lr=0.1,
    )
    refused(
        group, ValueError, "partition is one of", p(), sgd_class, group, partition="cyclic", lr=0.1
    )
    refused(
        group,
        ValueError,
        "cost is",
        p(),
        sgd_class,
        group,
        partition="balanced",
        cost="time",
        lr=0.1,
    )
    for gone in ({"overlap": True}, {"bucket_cap_mb": 4.0}):
        words = f"no argument {next(iter(gone))} any more"
        refused(group, TypeError, words, p(), sgd_class, group, lr=0.1, **gone)
    refused(group, ValueError, "empty parameter list", [], sgd_class, group, lr=0.1)
    refused(group, TypeError, "iterable", torch.ones(3), sgd_class, group, lr=0.1)
    refused(group, ValueError, "given twice", [p()[0]] * 2, sgd_class, group, lr=0.1)
    sparse = torch.eye(3).to_sparse().requires_grad_()
    refused(group, ValueError, "dense", [*p(), sparse], sgd_class, group, lr=0.1)
    refused(group, ValueError, "learning rate", p(), sgd_class, group, lr=-1.0)
    refused(group, ValueError, "some on meta", [on_meta], group=group, one_copy=True, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(group, ValueError, "non-leaf", [p()[0] * 2], sgd_class, group, lr=0.1)
    # On a matrix's owner the base optimizer itself raises.
    words = "2D parameters"
    raises_on_all(
        group,
        Exception,
        lambda: OSS([*p(), torch.nn.Parameter(torch.ones(5))], torch.optim.Muon, group),
        words,
    )
    sgd(group).step()


def test_ranks_that_differ_are_named_on_all(group):
    if group.size == 1:
        return
    p, rank = nets.matrices, group.rank
    is_first = rank == 0
    cases = [
        (p() + p()[:rank], {}, "group 0 parameter 5"),
        ([torch.nn.Parameter(torch.ones(3 + rank))], {}, "group 0 parameter 0"),
        ([torch.nn.Parameter(torch.ones(3), requires_grad=is_first)], {}, "group 0 parameter 0"),
        (
            [torch.nn.Parameter(torch.ones(3).to(torch.float64 if is_first else torch.float32))],
            {},
            "group 0 parameter 0",
        ),
        (p(), {"lr": 0.1 + rank}, "defaults"),
        (p(), {"momentum": rank / 10}, "defaults"),
        (p(), {"partition": "flat" if is_first else "greedy"}, "arguments"),
        (p(), {"optim": torch.optim.SGD if is_first else torch.optim.Adam}, "arguments"),
        (p(), {"one_copy": is_first}, "arguments"),
        (p(), {"partition": "balanced", "cost": "bytes" if is_first else "matrix"}, "arguments"),
        (
            p(),
            {
                "partition": "balanced",
                "cost": lambda tensor: tensor.numel() if is_first else -tensor.numel(),
            },
            "owners",
        ),
    ]
    for parameters, settings, words in cases:
        refused(group, DisagreementError, words, parameters, group=group, **{"lr": 0.1, **settings})

    def cost(parameter):
        if rank == 1:
            raise ZeroDivisionError("my own cost")
        return 1.0

    raises_on_all(
        group,
        Exception,
        lambda: OSS(p(), group=group, partition="balanced", cost=cost, lr=0.1),
        "my own cost",
    )
    raises_on_all(
        group,
        Exception,
        lambda: OSS(p() if is_first else None, group=group, lr=0.1),
        "not iterable",
    )
    sgd(group).step()


def test_it_cannot_be_copied_or_pickled(group):
    sharded = sgd(group)
    for call, words in (
        (copy.deepcopy, "cannot be copied"),
        (copy.copy, "cannot be pickled"),
        (pickle.dumps, "cannot be pickled"),
    ):
        raises_on_all(group, TypeError, lambda call=call: call(sharded), words)


def test_schedulers_hooks_names_and_profiles(group):
    calls = []
    named = [torch.nn.Linear(5, 7), torch.nn.Linear(5, 7)]
    named[1].load_state_dict(named[0].state_dict())
    for net in named:
        group.broadcast(net.weight.data, 0)
        group.broadcast(net.bias.data, 0)
    sharded = OSS(named[0].named_parameters(), torch.optim.AdamW, group, lr=torch.tensor(0.1))
    plain = torch.optim.AdamW(named[1].named_parameters(), lr=torch.tensor(0.1))
    sharded.register_step_pre_hook(
        lambda optimizer, args, kwargs: calls.append(("before", optimizer is sharded))
    )
    sharded.register_step_post_hook(
        lambda optimizer, args, kwargs: calls.append(("after", optimizer is sharded))
    )
    for optimizer in (sharded, plain):
        # The scheduler reads betas from the defaults.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=9)
        for number in range(8):
            nets.give_gradients(nets.all_parameters(optimizer), number)
            optimizer.step()
            scheduler.step()
    wrong = nets.differences(sharded, plain)
    agree(group, not wrong and sharded.param_groups[0]["param_names"] == ["weight", "bias"], wrong)
    agree(group, calls == [("before", True), ("after", True)] * 8)
    agree(
        group,
        sharded.defaults.keys() == plain.defaults.keys() and "AdamW" not in type(sharded).__name__,
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sharded.clip_grad_norm(1.0)
        sharded.step()
    names = {event.key for event in profile.key_averages()}
    agree(
        group,
        {"mpidist::oss::optim_step", "mpidist::oss::gather", "mpidist::oss::clip_grad_norm"}
        <= names,
        str(names),
    )
    sharded.zero_grad()
    agree(group, all(parameter.grad is None for parameter in named[0].parameters()))


def test_settings_go_both_ways_around_each_step(group):
    class Annealed(torch.optim.SGD):
        """Optimizer that changes its own settings in a step."""

        def step(self, closure=None):
            super().step(closure)
            for held in self.param_groups:
                held["lr"] *= 0.5
                held["steps"] = held.get("steps", 0) + 1

    sharded = OSS(
        [{"params": nets.matrices(), "lr": 1.0}, {"params": nets.late(), "momentum": 0.5}],
        Annealed,
        group,
        lr=2.0,
    )
    sharded.step()
    agree(
        group,
        [held["lr"] for held in sharded.param_groups] == [0.5, 1.0]
        and sharded.param_groups[1]["steps"] == 1,
    )
    sharded.param_groups[0]["lr"] = 8.0
    sharded.step()
    found = [(held["lr"], held["momentum"]) for held in sharded.param_groups]
    agree(
        group,
        found
        == [(4.0, 0), (0.5, 0.5)]
        == [(held["lr"], held["momentum"]) for held in sharded.optim.param_groups],
    )


def test_a_setting_that_is_deleted_stays_deleted(group):
    """As of torch's optimizers, whose step then says what it misses."""
    held = nets.matrices()
    sharded = OSS([{"params": held, "own": 1}], torch.optim.SGD, group, lr=2.0)
    sharded.step()
    del sharded.param_groups[0]["own"]
    sharded.step()
    sharded.step()
    keys = set(sharded.param_groups[0]), set(sharded.optim.param_groups[0])
    agree(group, all("own" not in each for each in keys), str(keys))
    lr = sharded.param_groups[0].pop("lr")
    has_pieces = bool(sharded.optim.param_groups[0]["params"])
    raises_on_all(group, KeyError if has_pieces else DisagreementError, sharded.step, "lr")
    agree(group, "lr" not in sharded.param_groups[0])
    sharded.param_groups[0]["lr"] = lr
    sharded.step()
    agree(group, "lr" in sharded.optim.param_groups[0])


def test_fewer_parameters_than_ranks_and_a_net_smaller_than_a_unit(group):
    for kind in nets.partitions_of("AdamW"):
        one = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
        sharded = OSS(one[:1], torch.optim.AdamW, group, partition=kind, lr=0.1, fused=True)
        plain = torch.optim.AdamW(one[1:], lr=0.1, fused=True)
        for parameter, optimizer in zip(one, (sharded, plain), strict=True):
            for _ in range(3):
                parameter.grad = torch.full((3,), 2.0)
                optimizer.step()
        wrong = nets.differences(sharded, plain)
        agree(group, not wrong, f"{kind} {wrong}")
        held = sum(value.nbytes for each in sharded.state.values() for value in each.values())
        agree(group, sum(group.all_gather_object(held)) == 3 * 4 * 2 + 4)


@pytest.mark.parametrize("within_closure", [False, True])
def test_nobody_writes_the_one_copy_that_another_still_reads(world, group, within_closure):
    """Rank 0 reads parameters long after the others entered their step or left their closure."""
    parameters = [torch.nn.Parameter(torch.ones(3000)) for _ in range(max(group.size, 2))]
    sharded = OSS(parameters, torch.optim.SGD, group, lr=1.0, one_copy=True)
    others = range(1, group.size)
    for step in range(5):
        expected = 1.0 - step
        seen = []

        def read(expected=expected, seen=seen):
            if group.rank == 0:
                for other in others:
                    world.recv(torch.empty(1), other)
                seen += [all(bool((p == expected).all()) for p in parameters) for _ in range(100)]
            else:
                world.send(torch.ones(1), 0)

        for parameter in parameters:
            parameter.grad = torch.ones(3000)
        if within_closure:
            sharded.step(read)
        else:
            read()
            sharded.step()
        agree(group, all(seen), f"{seen.count(False)} of {len(seen)} times")


@pytest.mark.usefixtures("default_group")
def test_dtensors_are_refused_on_all_ranks(group):
    mesh = init_device_mesh("cpu", (group.size,))
    parts = [torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))]
    refused(group, ValueError, "is a DTensor", parts, torch.optim.SGD, group, lr=0.1)
    sharded = sgd(group)
    raises_on_all(group, ValueError, lambda: sharded.add_param_group({"params": parts}), "DTensor")
    sharded.step()


@pytest.mark.parametrize(
    "options", [{}, {"partition": "flat"}, {"one_copy": True}, {"wire": "bf16"}]
)
def test_a_graph_that_needs_the_old_parameters_is_refused_on_all_ranks(group, options):
    """As with a plain optimizer; other ranks' parameters count, those without gradients do not."""
    torch.manual_seed(0)
    # Only the last weight is needed, which one rank owns.
    net = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 2))
    other = torch.nn.Linear(9, 2)
    sharded = OSS(
        [*net.parameters(), *other.parameters()], torch.optim.SGD, group, lr=0.1, **options
    )
    for _ in range(2):
        loss = net(torch.ones(4, 9)).sum()
        unused = other(torch.ones(4, 9, requires_grad=True)).sum()
        loss.backward(retain_graph=True)
        sharded.step()
        raises_on_all(group, RuntimeError, loss.backward, "inplace operation")
        unused.backward()
        sharded.zero_grad()


def test_gradients_of_another_dtype_are_stepped_as_a_plain_optimizer_steps_them(group):
    def parameters():
        found = [torch.nn.Parameter(p.detach().bfloat16()) for p in nets.parameters_for("Muon")]
        for parameter in found:
            parameter.grad_dtype = torch.float32
        return found

    plain = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    for kind in nets.partitions_of("SGD"):
        sharded = sgd(group, parameters(), momentum=0.9, partition=kind)
        for optimizer in (sharded,) if plain.state else (sharded, plain):
            for step in range(3):
                for parameter in nets.all_parameters(optimizer):
                    parameter.grad = torch.full(parameter.shape, 0.01 * (step + 1))
                optimizer.step()
        wrong = nets.differences(sharded, plain)
        agree(group, not wrong, f"{kind}: {wrong}")


@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_state_that_is_assigned_takes_the_place_of_the_old(group, kind):
    parameters = nets.matrices()
    plain = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in parameters])
    sharded = OSS(parameters, torch.optim.AdamW, group, partition=kind)
    for step in range(4):
        for optimizer in (plain, sharded):
            if step == 2:
                optimizer.state = collections.defaultdict(dict)
            nets.give_gradients(nets.all_parameters(optimizer), step)
            optimizer.step()
    wrong = nets.differences(sharded, plain)
    agree(group, not wrong and sharded.state is sharded.optim.state, wrong)
