"""Settings that one step in several calls changes: kept back from each call, set at the end."""

from __future__ import annotations

import pytest
import torch

from mpidist.zero.step.setting_changes import SettingChanges


class Counts(torch.optim.SGD):
    """SGD that counts and measures in its groups, in place in a tensor, and in an attribute."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.newest = 0.5
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["total"] += 1
            group["size"] = sum(p.numel() for p in group["params"])
        return super().step(closure)


def made():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    total = torch.tensor(7)
    optim = Counts([weight], lr=0.1)
    optim.param_groups[0]["total"] = total
    return optim, weight, total


def test_each_call_begins_with_the_same_settings_and_the_step_counts_once():
    optim, weight, total = made()
    group, before = optim.param_groups[0], set(optim.param_groups[0])
    changes = SettingChanges()
    for params in ([], [weight], []):
        group["params"] = params
        with changes.kept_back(optim):
            optim.step()
            assert (optim.steps, group["step"], int(group["total"])) == (1, 1, 8)
        assert optim.steps == 0 and not hasattr(optim, "newest")
        assert set(group) == before and group["total"] is total and int(total) == 7
    changes.set(optim)
    assert (optim.steps, optim.newest, group["step"]) == (1, 0.5, 1)
    # Set in place; the size that the call with parameters found.
    assert group["total"] is total and int(total) == 8 and group["size"] == 3


def test_settings_that_a_call_left_alone_may_change_between_the_calls():
    optim, _, total = made()
    changes = SettingChanges()
    with changes.kept_back(optim):
        optim.step()
    optim.param_groups[0]["lr"] = 0.5
    changes.set(optim)
    assert optim.param_groups[0]["lr"] == 0.5 and int(total) == 8


def test_settings_are_as_before_after_an_error():
    optim, _, total = made()

    def failing():
        with SettingChanges().kept_back(optim):
            optim.step()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert "step" not in optim.param_groups[0] and int(total) == 7 and optim.steps == 0
