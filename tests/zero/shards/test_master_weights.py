"""Master copies in saved states: a resumed run has the bits of an uninterrupted one."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mpidist.zero.state.merging import merged
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import (
    ADAM,
    FROZEN,
    SGD,
    parameters_of,
    same,
    same_run,
    sharded,
    take_parameters,
    train,
    whole,
)

pytestmark = pytest.mark.mpi(min_size=1)

WIRES = ["bf16", "fp16"]
PLAIN = (torch.optim.SGD, {"lr": 0.1})  # without any other state


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks: rank 0's."""
    return world.broadcast_object(str(tmp_path), 0)


def consolidated(source):
    source.consolidate_state_dict(-1)
    return source.state_dict()


def from_file(source):
    file = io.BytesIO()
    torch.save(consolidated(source), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def of_ranks(source):
    return source.group.all_gather_object(source.rank_local_state_dict())


FORMS = {
    "consolidated": consolidated,
    "file": from_file,
    "rank-local": lambda source: of_ranks(source)[source.rank],
    "merged": lambda source: merged(of_ranks(source)),
}


@pytest.mark.parametrize("partition", ["greedy", "flat"])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(group, form, wire, partition):
    wrong = []
    # Both orders with Adam; each of the others with one.
    for kind, *orders in (
        (ADAM, "parameters", "optimizer"),
        (SGD, "parameters"),
        (PLAIN, "optimizer"),
    ):
        source = sharded(group, kind, partition, wire=wire)
        train(source, range(3), skipped=(4,))  # parameter 4 has a master, and no other state
        visible = [value.detach().clone() for value in parameters_of(source)]
        saved = FORMS[form](source)
        for first in orders:
            target = sharded(group, kind, partition, wire=wire)
            train(target, range(20, 22))
            if first == "parameters":
                write(target, visible)
            target.load_state_dict(saved)
            if first == "optimizer":
                write(target, visible)
            own = sharded(group, kind, partition, wire=wire)
            train(own, range(3), skipped=(4,))
            if not same_run(target, own, range(3, 6)):
                wrong.append(f"{kind[0].__name__}, {first} first")
    agree(group, not wrong, "; ".join(wrong))


def write(optimizer, values):
    """Write parameters, as loading a model does."""
    with torch.no_grad():
        for one, other in zip(parameters_of(optimizer), values, strict=True):
            one.copy_(other)


@pytest.mark.parametrize("wire", WIRES)
def test_one_optimizer_is_rewound(group, wire):
    """The optimizer is loaded before the model, as FairScale's test of reproducibility does."""
    source = sharded(group, (torch.optim.RMSprop, {"lr": 0.1}), wire=wire)
    train(source, range(1))
    saved = copy.deepcopy(source.state_dict(all_ranks=True))
    visible = [value.detach().clone() for value in parameters_of(source)]
    train(source, range(1, 3))
    expected = [value.detach().clone() for value in parameters_of(source)]
    source.load_state_dict(saved)
    agree(group, same(source.state_dict(all_ranks=True), saved), "the load is not what was saved")
    write(source, visible)
    train(source, range(1, 3))
    agree(group, all(map(torch.equal, parameters_of(source), expected)), "other bits")


@pytest.mark.parametrize("wire", WIRES)
def test_another_partition_and_wire_take_the_masters(group, wire):
    """Half wires round each element by itself, so that the partition has no part in the bits."""
    source = sharded(group, ADAM, "greedy", wire=wire)
    train(source, range(3))
    target = sharded(group, ADAM, "flat", wire=wire)
    saved = source.state_dict(all_ranks=True)
    target.load_state_dict(saved)
    take_parameters(target, source)
    agree(group, same(target.state_dict(all_ranks=True), saved), "loaded and saved again")
    agree(group, same_run(target, source, range(3, 5)), "by another partition")
    other = sharded(group, ADAM, "flat", wire={"bf16": "fp16", "fp16": "bf16"}[wire])
    saved = source.state_dict(all_ranks=True)
    other.load_state_dict(saved)
    take_parameters(other, source)
    other.refresh_trainable()
    masters = other.state_dict(all_ranks=True).get("masters", {})
    expected = saved.get("masters", {})
    agree(
        group,
        all(same(masters[number]["value"], held["value"]) for number, held in expected.items())
        and len(masters) == len(expected),
        "by another wire",
    )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("form", ["consolidated", "rank-local"])
def test_parameters_that_are_not_those_of_the_state_keep_their_values(group, form, wire):
    source = sharded(group, PLAIN, wire=wire)
    train(source, range(2))
    saved = FORMS[form](source)
    target, other = (sharded(group, PLAIN, wire=wire) for _ in range(2))
    averages = [value.detach() * 0.5 for value in parameters_of(source)]
    target.load_state_dict(saved)
    for one in (target, other):
        write(one, averages)
    agree(group, same_run(target, other, range(2, 4)), "masters of other parameters were stepped")


@pytest.mark.parametrize("wire", WIRES)
def test_what_was_written_before_a_save_is_saved(group, wire):
    source = sharded(group, PLAIN, wire=wire)
    train(source, range(2))
    with torch.no_grad():
        parameters_of(source)[0].mul_(0.75)
    for form in ("consolidated", "rank-local"):
        saved = FORMS[form](source)
        target = sharded(group, PLAIN, wire=wire)
        take_parameters(target, source)
        target.load_state_dict(saved)
        twin = sharded(group, PLAIN, wire=wire)
        train(twin, range(2))
        with torch.no_grad():
            parameters_of(twin)[0].mul_(0.75)
        agree(group, same_run(target, twin, range(2, 4)), form)


@pytest.mark.parametrize("wire", WIRES)
def test_torchs_optimizer_takes_the_state(group, wire):
    source, plain = sharded(group, ADAM, wire=wire), whole(ADAM)
    train(source, range(2), skipped=(4,))
    saved = source.state_dict(all_ranks=True)
    agree(group, ("masters" in saved) == (group.size > 1))
    plain.load_state_dict(saved)
    ok = set(plain.state_dict()) == {"state", "param_groups"}
    ok = ok and same(plain.state_dict()["state"], saved["state"])
    take_parameters(plain, source)
    train(plain, range(2, 4))  # the first step of parameter 4 too
    agree(group, ok and all(value.isfinite().all() for value in parameters_of(plain)))
    # And back: a state without masters, which start from the parameters.
    target, other = sharded(group, ADAM, wire=wire), sharded(group, ADAM, wire=wire)
    for one in (target, other):
        train(one, range(20, 21))
        one.load_state_dict(plain.state_dict())
        take_parameters(one, plain)
    exact = [value.clone() for value in parameters_of(plain)]
    for value, held in target.state_dict(all_ranks=True).get("masters", {}).items():
        assert torch.equal(held["value"], exact[value])
    agree(group, same_run(target, other, range(4, 6)))


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_distributed_checkpoints(group, folder, wire, copies, partition):
    wrong = []
    for kind in (ADAM, PLAIN):
        where = f"{folder}/{kind[0].__name__}"
        source = sharded(group, kind, partition, names=True, wire=wire)
        train(source, range(2))
        dcp.save({"optimizer": source.sharded_state_dict()}, checkpoint_id=where)
        for first in ("parameters", "optimizer"):
            target = sharded(group, kind, partition, names=True, wire=wire)
            train(target, range(20, 21))
            visible = [value.detach().clone() for value in parameters_of(source)]
            if first == "parameters":
                write(target, visible)
            content = {"optimizer": target.sharded_state_dict(copies=copies)}
            dcp.load(content, checkpoint_id=where)
            target.load_sharded_state_dict(content["optimizer"])
            if first == "optimizer":
                write(target, visible)
            own = sharded(group, kind, partition, names=True, wire=wire)
            train(own, range(2))
            if not same_run(target, own, range(2, 4)):
                wrong.append(f"{kind[0].__name__}, {first} first")
    agree(group, not wrong, "; ".join(wrong))


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("wire", WIRES)
def test_a_distributed_checkpoint_without_masters(group, folder, wire):
    source = sharded(group, ADAM, names=True)
    train(source, range(2))
    dcp.save({"optimizer": source.sharded_state_dict()}, checkpoint_id=folder)
    target = sharded(group, ADAM, names=True, wire=wire)
    take_parameters(target, source)
    content = {"optimizer": target.sharded_state_dict()}
    error = None
    try:
        dcp.load(content, checkpoint_id=folder)
    except CheckpointException as raised:
        error = raised
    agree(group, (error is not None) == (group.size > 1), repr(error))
    content = {"optimizer": target.sharded_state_dict(masters=False)}
    dcp.load(content, checkpoint_id=folder)
    target.load_sharded_state_dict(content["optimizer"])
    expected = sharded(group, ADAM, names=True, wire=wire)
    expected.load_state_dict(source.state_dict(all_ranks=True))
    take_parameters(expected, source)
    agree(group, same_run(target, expected, range(2, 4)))


def test_masters_that_do_not_fit_are_refused_by_all_ranks(group):
    source = sharded(group, ADAM, wire="bf16")
    train(source, range(1))
    saved = source.state_dict(all_ranks=True)
    for masters, words in (
        ([torch.zeros(3)], "a dict by parameter"),
        ({99: {"value": torch.zeros(3)}}, "which none of its parameter groups names"),
        ({0: torch.zeros(3)}, "a dict with 'value'"),
        ({0: {"value": torch.zeros(3)}}, "of parameter 0 has shape"),
    ):
        wrong = {**saved, "masters": masters}
        raises_on_all(group, ValueError, lambda wrong=wrong: source.load_state_dict(wrong), words)
    agree(group, same(source.state_dict(all_ranks=True), saved))


def test_a_parameter_that_is_frozen_at_the_save_trains_again_in_both_runs(group):
    source = sharded(group, PLAIN, wire="bf16")
    train(source, range(2))
    parameters_of(source)[FROZEN].requires_grad_(False)
    source.refresh_trainable()
    target = sharded(group, PLAIN, wire="bf16", frozen=True)
    target.load_state_dict(source.state_dict(all_ranks=True))
    take_parameters(target, source)
    agree(group, same_run(target, source, range(2, 4)), "while it is frozen")
    for one in (target, source):
        parameters_of(one)[FROZEN].requires_grad_(True)
    agree(group, same_run(target, source, range(4, 6)), "when it trains again")
