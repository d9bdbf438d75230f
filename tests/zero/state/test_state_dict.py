"""State dicts in torch's format: errors, each piece's part, and no reference to the argument."""

import copy

import pytest
import torch

from mpidist.zero.shards import groups
from mpidist.zero.shards.flat_buffers import in_memory_order
from mpidist.zero.shards.pieces import Piece
from mpidist.zero.state import state_dict
from mpidist.zero.state.local_optimizer import owned
from mpidist.zero.state.shard_state import MASTER_KIND
from tests.zero.stateful import ADAM, SGD, parameters_of, same, train, whole


def stepped(kind=ADAM):
    optimizer = whole(kind)
    train(optimizer, range(2))
    return optimizer


def test_a_packed_state_dict_is_torchs_and_shares_no_setting():
    optimizer = stepped()
    state = dict(enumerate(optimizer.state[parameter] for parameter in parameters_of(optimizer)))
    made = state_dict.assembled(state, groups.packed(optimizer.param_groups))
    assert same(made, optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = torch.tensor(1.0)
    made = state_dict.assembled(state, groups.packed(optimizer.param_groups))
    optimizer.param_groups[0]["lr"].fill_(2)
    assert made["param_groups"][0]["lr"] == 1


def test_masters_are_beside_the_state_and_alone_are_none():
    value, moment = torch.ones(2), torch.zeros(2)
    held = {0: {MASTER_KIND: value}, 1: {MASTER_KIND: value, "m": moment}, 2: {}, 3: {"m": moment}}
    assert state_dict.assembled(held, []) == {
        "state": {1: {"m": moment}, 2: {}, 3: {"m": moment}},
        "param_groups": [],
        "masters": {0: {"value": value}, 1: {"value": value}},
    }


@pytest.mark.parametrize("kind", [ADAM, SGD])
def test_what_fits_is_taken(kind):
    optimizer = stepped(kind)
    given = optimizer.state_dict()
    before = copy.deepcopy(given)
    state_dict.require_fits(given, optimizer.param_groups, optimizer)
    renamed = copy.deepcopy(given)
    renamed["state"] = {f"p{key}": held for key, held in renamed["state"].items()}
    for group in renamed["param_groups"]:
        group["params"] = [f"p{key}" for key in group["params"]]
    # Any keys are valid.
    state_dict.require_fits(renamed, optimizer.param_groups, optimizer)
    assert same(state_dict.by_number(renamed), before["state"]) and same(given, before)


def test_what_does_not_fit_is_named():
    optimizer = stepped()
    good = optimizer.state_dict()
    without_step = {name: value for name, value in good["state"][0].items() if name != "step"}
    cases = [
        (stepped(SGD).state_dict(), "another class"),
        ({"param_groups": good["param_groups"]}, "'state' and 'param_groups'"),
        (7, "got int"),
        ({**good, "param_groups": good["param_groups"][:1]}, "another model"),
        ({**good, "param_groups": [{}, {}]}, "groups with 'params'"),
        ({**good, "state": {0: 3}}, "a dict by name"),
        ({**good, "state": {6: {}}}, "none of its parameter groups"),
        ({**good, "state": {0: {"exp_avg": torch.zeros(7, 5)}}}, "shape"),
        ({**good, "state": {0: {"momentum_buffer": torch.zeros(5, 7)}}}, "another class"),
        ({**good, "state": {0: without_step}}, "parameter 0 has no 'step', which Adam needs"),
    ]
    for given, words in cases:
        with pytest.raises(ValueError, match=words):
            state_dict.require_fits(given, optimizer.param_groups, optimizer)


def test_a_learning_rate_that_is_a_whole_number_is_missed_too():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1)
    given = optimizer.state_dict()
    del given["param_groups"][0]["lr"]
    with pytest.raises(ValueError, match="SGD needs lr in each parameter group"):
        state_dict.require_fits(given, optimizer.param_groups, optimizer)


def taken(value, piece):
    return owned(state_dict.part(value, piece), piece)


def test_a_piece_takes_its_elements_and_nothing_that_a_step_would_change():
    parameter = torch.nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    value = torch.arange(120.0).view(2, 3, 4, 5)
    cut = Piece(0, parameter, 7, 50, torch.nn.Parameter(torch.ones(43)), (0, 0))
    assert torch.equal(state_dict.part(value, cut), in_memory_order(value, parameter)[7:50])
    # A piece without a home: its value is not copied into a flat tensor.
    whole_one = Piece(0, parameter, 0, 120, parameter)
    for given in (value, torch.tensor(3.0), torch.ones(7), value.to_sparse()):
        made = taken(given, whole_one)
        assert made is not given and torch.equal(made.to_dense(), given.to_dense())
    numbers = [1, 2]
    assert taken(numbers, cut) == numbers and taken(numbers, cut) is not numbers
    one, other = stepped().state_dict(), stepped(SGD).state_dict()
    assert state_dict.summary(one) != state_dict.summary(
        other
    ) and "6 parameters" in state_dict.summary(one)
