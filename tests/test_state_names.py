"""Names of the state of torch's optimizers, compared with the state that their steps make."""

import copy

import pytest
import torch

from mpidist import state_names

SETTINGS = {
    torch.optim.SGD: [{"momentum": 0.9}],
    torch.optim.Adam: [{}, {"amsgrad": True}],
    torch.optim.AdamW: [{}, {"amsgrad": True}],
    torch.optim.RMSprop: [{}, {"momentum": 0.5}, {"centered": True, "momentum": 0.5}],
}
CASES = [(kind, more) for kind in state_names.NAMES for more in SETTINGS.get(kind, [{}])]


def stepped(kind, more):
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = kind([("first", weights[0]), ("second", weights[1])], lr=0.1, **more)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def load_and_step(optimizer, given):
    optimizer.load_state_dict(given)
    optimizer.step()


@pytest.mark.parametrize(("kind", "more"), CASES, ids=str)
def test_a_step_needs_what_is_said_to_be_needed(kind, more):
    """Without any of the names torch raises, in the load or in the next step."""
    given = stepped(kind, more).state_dict()
    groups, state = given["param_groups"], given["state"]
    names = set(state[0])
    assert names <= state_names.NAMES[kind]
    defaults = stepped(kind, more).defaults
    state_names.require_complete(kind, defaults, groups, state)
    for name in names:
        wrong = copy.deepcopy(given)
        del wrong["state"][1][name]
        needed = state_names.lacking(kind, groups[0], wrong["state"][1])
        if len(names) == 1:
            assert not needed  # the state is that of a parameter before its first step
            continue
        assert needed == [name]
        with pytest.raises(ValueError, match=rf"parameter 1 \('second'\) has no '{name}', which"):
            state_names.require_complete(kind, defaults, groups, wrong["state"])
        optimizer = stepped(kind, more)
        with pytest.raises(KeyError, match=name):
            load_and_step(optimizer, wrong)


@pytest.mark.parametrize(("kind", "more"), CASES, ids=str)
@pytest.mark.parametrize("lr", [1, 0.1, torch.tensor(0.1)], ids=str)
def test_a_group_needs_the_numbers_and_no_switches(kind, more, lr):
    """Without a number torch raises at the next step; it adds the switches in the load."""
    optimizer = stepped(kind, more)
    optimizer.defaults["lr"] = lr
    given = optimizer.state_dict()
    for name in optimizer.defaults:
        wrong = copy.deepcopy(given)
        del wrong["param_groups"][0][name]
        groups, state = wrong["param_groups"], wrong["state"]
        if isinstance(optimizer.defaults[name], (bool, type(None))):
            state_names.require_complete(kind, optimizer.defaults, groups, state)
            load_and_step(optimizer, wrong)
        else:
            with pytest.raises(ValueError, match=f"{kind.__name__} needs {name} in each"):
                state_names.require_complete(kind, optimizer.defaults, groups, state)


def test_what_needs_nothing():
    assert state_names.lacking(torch.optim.Adam, {"amsgrad": True}, ()) == []
    assert state_names.lacking(torch.optim.LBFGS, {}, {"d"}) == []
    group = {"amsgrad": False, "params": ["w", "b"]}
    state_names.require_complete(torch.optim.Adam, {}, [group], {"b": {}})
