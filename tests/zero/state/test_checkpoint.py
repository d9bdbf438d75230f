"""Sharded checkpoints: saved, then loaded with another world size or layout, or by torch alone."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mpidist.errors import DisagreementError
from mpidist.zero.optimizer import OSS
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import (
    ADAM,
    FROZEN,
    SGD,
    groups,
    parameters,
    parameters_of,
    same,
    same_run,
    sharded,
    take_parameters,
    train,
    whole,
)

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group")]


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks: rank 0's."""
    return world.broadcast_object(str(tmp_path), 0)


@pytest.fixture
def some(world):
    """Groups of all ranks but the last, mpidist's and torch's; None outside, or with one rank."""
    count = max(world.size - 1, 1)
    native, torch_group = world.new_group(range(count)), dist.new_group(list(range(count)))
    yield native, torch_group
    if native is not None:
        native.close()
        dist.destroy_process_group(torch_group)
    world.barrier()


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_it_is_loaded_by_fewer_ranks_with_another_partition(group, some, folder, partition):
    fewer, of_torch = some
    for kind in (ADAM, SGD):
        where = f"{folder}/{kind[0].__name__}"
        source, expected = sharded(group, kind, partition, names=True), whole(kind, names=True)
        for one in (source, expected):
            train(one, range(2))
        model = {"weight": torch.arange(3.0)}
        dcp.save({"model": model, "optimizer": source.sharded_state_dict()}, checkpoint_id=where)
        before = expected.state_dict()
        ok = True
        if fewer is not None:
            target = sharded(
                fewer, kind, "flat" if partition == "greedy" else "balanced", names=True
            )
            take_parameters(target, expected)
            content = {
                "model": {"weight": torch.zeros(3)},
                "optimizer": target.sharded_state_dict(),
            }
            dcp.load(content, checkpoint_id=where, process_group=of_torch)
            target.load_sharded_state_dict(content["optimizer"])
            loaded = target.state_dict(all_ranks=True)
            ok = same(loaded, before) and torch.equal(content["model"]["weight"], model["weight"])
            ok = ok & same_run(target, copy.deepcopy(expected), range(2, 4))
        agree(group, ok, f"{kind[0].__name__} by {max(group.size - 1, 1)} ranks")
        # torch alone reads the same keys and shapes, and converts them to a file for one process.
        if group.rank == 0:
            dcp_to_torch_save(where, f"{where}/whole.pt")
            content = torch.load(f"{where}/whole.pt", weights_only=False)["optimizer"]
            ok = all(
                torch.equal(
                    torch.as_tensor(content["state"][f"layer.{number}"][name]),
                    torch.as_tensor(value),
                )
                for number, held in before["state"].items()
                for name, value in held.items()
            )
            ok = ok and [name for one in content["param_groups"] for name in one["params"]] == [
                f"layer.{n}" for n in range(6)
            ]
        agree(group, ok, "torch reads something else")


def test_what_more_ranks_load_and_another_memory_format(group, some, folder):
    fewer, of_torch = some
    source = whole(ADAM)
    train(source, range(2))
    if fewer is not None:
        small = sharded(fewer, ADAM, "flat")
        train(small, range(2))
        dcp.save(
            {"optimizer": small.sharded_state_dict(copies=False)},
            checkpoint_id=folder,
            process_group=of_torch,
        )
    group.barrier()
    params = parameters()
    params[3].data = params[3].data.contiguous()
    target = OSS(groups(params), torch.optim.Adam, group, partition="flat", **ADAM[1])
    take_parameters(target, source)
    content = {"optimizer": target.sharded_state_dict(copies=False)}
    dcp.load(content, checkpoint_id=folder)
    target.load_sharded_state_dict(content["optimizer"])
    agree(group, same_run(target, source, range(2, 4)), "by more ranks, contiguous")


def test_saved_in_the_background_is_the_state_of_the_call(group, folder):
    source, expected = sharded(group, ADAM, "flat"), whole(ADAM)
    for one in (source, expected):
        train(one, range(2))
    own = dist.new_group()
    pending = dcp.async_save(
        {"optimizer": source.sharded_state_dict()}, checkpoint_id=folder, process_group=own
    )
    train(source, range(7, 9))
    pending.result(timeout=60)
    group.barrier()
    dist.destroy_process_group(own)
    content = {"optimizer": source.sharded_state_dict()}
    dcp.load(content, checkpoint_id=folder)
    source.load_sharded_state_dict(content["optimizer"])
    loaded = source.state_dict(all_ranks=True)
    agree(group, same(loaded, expected.state_dict()), "the steps after the call are in it")


def test_parameters_without_state_and_frozen_ones(group, folder):
    source, expected = sharded(group, ADAM, "flat"), whole(ADAM)
    for one in (source, expected):
        train(one, range(2), skipped=(1,))
    dcp.save({"optimizer": source.sharded_state_dict()}, checkpoint_id=folder)
    target = sharded(group, ADAM, "greedy", frozen=True)
    take_parameters(target, expected)
    content = {"optimizer": target.sharded_state_dict()}
    error = None
    try:
        dcp.load(content, checkpoint_id=folder)
    except CheckpointException as raised:
        error = raised
    # Shapes of the state that the next step would make for parameter 1.
    agree(group, "Missing key" in str(error), repr(error))
    dcp.load(content, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    target.load_sharded_state_dict(content["optimizer"])
    loaded = target.state_dict(all_ranks=True)["state"]
    wanted = expected.state_dict()["state"]
    wanted.pop(FROZEN)
    agree(group, same(loaded, wanted), "parameters 1 and 2 have no state")
    # Unowned state is saved too.
    frozen = sharded(group, ADAM, "flat", frozen=True)
    frozen.load_state_dict(expected.state_dict())
    dcp.save({"optimizer": frozen.sharded_state_dict()}, checkpoint_id=f"{folder}/frozen")
    full = sharded(group, ADAM, "flat")
    content = {"optimizer": full.sharded_state_dict()}
    dcp.load(
        content,
        checkpoint_id=f"{folder}/frozen",
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    full.load_sharded_state_dict(content["optimizer"])
    loaded = full.state_dict(all_ranks=True)
    agree(
        group,
        same(loaded["state"], expected.state_dict()["state"]),
        "the frozen parameter's state is lost",
    )


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_parameters_without_elements_keep_their_state(group, folder, partition):
    def holder():
        return torch.nn.ParameterList([torch.ones(3), torch.ones(0), torch.ones(0, 4)])

    source, read, whole_one = holder(), holder(), holder()
    saving, loading = (
        OSS(one.named_parameters(), torch.optim.Adam, group, partition=partition, lr=0.1)
        for one in (source, read)
    )
    for _ in range(2):
        for parameter in source:
            parameter.grad = torch.ones_like(parameter)
        saving.step()
    dcp.save({"optimizer": saving.sharded_state_dict()}, checkpoint_id=folder)
    content = {"optimizer": loading.sharded_state_dict()}
    dcp.load(content, checkpoint_id=folder)
    loading.load_sharded_state_dict(content["optimizer"])
    loaded, saved = (one.state_dict(all_ranks=True) for one in (loading, saving))
    agree(group, same(loaded["state"], saved["state"]) and len(saved["state"]) == 3)
    plain = torch.optim.Adam(whole_one.named_parameters(), lr=0.1)
    content = {"optimizer": get_optimizer_state_dict(whole_one, plain)}
    dcp.load(content, checkpoint_id=folder)
    set_optimizer_state_dict(whole_one, plain, content["optimizer"])
    agree(group, same(plain.state_dict()["state"], saved["state"]), "into torch's")


def test_parameters_of_two_modules_that_name_them_alike(group, folder):
    def optimizer(seed):
        torch.manual_seed(seed)
        modules = [torch.nn.Linear(3, 2) for _ in range(2)]
        named = [{"params": list(module.named_parameters())} for module in modules]
        return OSS(named, torch.optim.Adam, group, lr=0.1)

    source, target = optimizer(0), optimizer(1)
    for step in range(2):
        for number, parameter in enumerate(parameters_of(source)):
            parameter.grad = torch.full_like(parameter, 1.0 + number + step)
        source.step()
    dcp.save({"optimizer": source.sharded_state_dict()}, checkpoint_id=folder)
    content = {"optimizer": target.sharded_state_dict()}
    dcp.load(content, checkpoint_id=folder)
    target.load_sharded_state_dict(content["optimizer"])
    loaded, saved = (one.state_dict(all_ranks=True) for one in (target, source))
    agree(group, same(loaded["state"], saved["state"]) and len(saved["state"]) == 4)


def test_another_model_or_class_is_refused_by_all_ranks(group):
    optimizer = sharded(group, ADAM)
    train(optimizer, range(1))
    before = optimizer.state_dict(all_ranks=True)
    named, other = sharded(group, ADAM, names=True), sharded(group, SGD)
    for given, words in (
        (named.sharded_state_dict(), "layer.0"),
        (other.sharded_state_dict(), "another class"),
        ({"state": {}}, "sharded_state_dict"),
    ):
        raises_on_all(
            group, ValueError, lambda given=given: optimizer.load_sharded_state_dict(given), words
        )
    if group.size > 1:
        given = other.sharded_state_dict() if group.rank else optimizer.sharded_state_dict()
        error = ValueError if group.rank else DisagreementError
        raises_on_all(group, error, lambda: optimizer.load_sharded_state_dict(given))
    content = optimizer.sharded_state_dict()
    part = next(
        (value for held in content["state"].values() for value in held.values() if value.dim()),
        None,
    )
    ok = True
    if part is not None:
        ok = "elements of shape" in repr(part)
        with pytest.raises(NotImplementedError, match="take its elements"):
            part + 1
    after = optimizer.state_dict(all_ranks=True)
    agree(group, ok and same(after, before) and len(parameters_of(optimizer)) == 6)


class Holder(torch.nn.Module):
    def __init__(self, source=None):
        super().__init__()
        for number, parameter in enumerate(parameters()):
            self.register_parameter(f"p{number}", parameter)
        if source is not None:
            take_parameters(
                torch.optim.SGD(self.parameters()), torch.optim.SGD(source.parameters())
            )


def test_torchs_own_optimizer_saves_for_it_and_loads_from_it(group, folder):
    model = Holder()
    source = torch.optim.Adam(model.named_parameters(), **ADAM[1])
    train(source, range(2))
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, source)}, checkpoint_id=f"{folder}/torch"
    )
    middle = Holder(model)
    optimizer = OSS(middle.named_parameters(), torch.optim.Adam, group, partition="flat", **ADAM[1])
    content = {"optimizer": optimizer.sharded_state_dict()}
    dcp.load(content, checkpoint_id=f"{folder}/torch")
    optimizer.load_sharded_state_dict(content["optimizer"])
    agree(group, same_run(optimizer, source, range(2, 4)), "from torch's")
    dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=f"{folder}/ours")
    last = Holder(middle)
    target = torch.optim.Adam(last.named_parameters(), **ADAM[1])
    content = {"optimizer": get_optimizer_state_dict(last, target)}
    dcp.load(content, checkpoint_id=f"{folder}/ours")
    set_optimizer_state_dict(last, target, content["optimizer"])
    agree(group, same_run(optimizer, target, range(4, 6)), "into torch's")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("few", [False, True])
def test_torchs_reader_takes_the_consolidated_state_and_no_step(group, kind, few):
    """It steps an optimizer that it takes for one without state: ranks without parameters alone."""
    model = torch.nn.Linear(2, 3, bias=False) if few else Holder()
    optimizer = OSS(model.parameters(), kind, group, lr=0.1)
    raises_on_all(
        group, RuntimeError, lambda: get_optimizer_state_dict(model, optimizer), "not consolidated"
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    raises_on_all(
        group, RuntimeError, lambda: get_optimizer_state_dict(model, optimizer), "not consolidated"
    )
    optimizer.consolidate_state_dict(-1)
    content = get_optimizer_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    steps = {float(held["step"]) for held in content["state"].values() if "step" in held}
    agree(group, content["param_groups"][0]["params"] == names, str(content["param_groups"]))
    agree(group, steps == ({1.0} if kind is torch.optim.Adam else set()), str(steps))
    agree(group, all(map(torch.equal, before, model.parameters())))
    fresh = OSS(model.parameters(), kind, group, lr=0.7)
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, fresh, content, options=options)
    fresh.consolidate_state_dict(-1)
    again = get_optimizer_state_dict(model, fresh)
    agree(group, same(again, content), "loaded and saved again")
    agree(group, bool(fresh.state) and bool(copy.deepcopy(fresh.state)), "true without entries")


class Own(torch.optim.Optimizer):
    """An optimizer whose constructor takes what its defaults do not hold, and vice versa."""

    def __init__(self, params, model):
        super().__init__(params, {"rate": 0.5, "name": "own"})
        self.scale = model["scale"]

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    total = self.state[parameter].setdefault("total", torch.zeros_like(parameter))
                    total += parameter.grad
                    parameter.data.add_(total, alpha=-group["rate"] * self.scale)


EVERY = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    *(
        (getattr(torch.optim, name), {})
        for name in (
            *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta"),
            *("ASGD", "RMSprop", "Rprop", "Adafactor"),
        )
    ),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (Own, {"model": {"scale": 0.25}}),
]


@pytest.mark.parametrize(
    "kind", EVERY, ids=lambda kind: "-".join([kind[0].__name__, *map(str, kind[1])])
)
def test_every_class_is_loaded_into_an_optimizer_without_state(group, folder, kind):
    source = sharded(group, kind, names=True)
    train(source, range(2))
    dcp.save({"optimizer": source.sharded_state_dict()}, checkpoint_id=folder)
    target = sharded(group, kind, names=True)
    take_parameters(target, source)
    content = {"optimizer": target.sharded_state_dict()}
    dcp.load(content, checkpoint_id=folder)
    target.load_sharded_state_dict(content["optimizer"])
    agree(group, same(target.state_dict(all_ranks=True), source.state_dict(all_ranks=True)))
    agree(group, same_run(target, source, range(2, 4)))


def test_a_matrix_optimizer_is_loaded_into_one_without_state(group, folder):
    made = []
    for _ in range(2):
        weights = [torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(4)]
        made.append(OSS(weights, torch.optim.Muon, group, lr=0.1))
    source, target = made
    train(source, range(2))
    dcp.save({"optimizer": source.sharded_state_dict()}, checkpoint_id=folder)
    take_parameters(target, source)
    content = {"optimizer": target.sharded_state_dict()}
    dcp.load(content, checkpoint_id=folder)
    target.load_sharded_state_dict(content["optimizer"])
    agree(group, same_run(target, source, range(2, 4)))


def test_hooks_do_not_see_the_step_that_makes_the_first_state(group):
    seen = []
    target = sharded(group, (Own, {"model": {"scale": 1.0}}), names=True)
    target.optim.register_step_pre_hook(lambda *given: seen.append(given))
    target.sharded_state_dict()
    agree(group, not seen and not list(target.optim.state))
