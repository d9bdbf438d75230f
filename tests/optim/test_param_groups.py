"""Settings of groups; test_distributed_optimizer has the errors of groups."""

from __future__ import annotations

import pytest
import torch

from mpidist.optim.param_groups import groups_of, same, settings_of, snapshot


def test_settings_without_parameters():
    assert settings_of({"params": [1], "param_names": ["a"], "lr": 0.5, "initial_lr": 1.0}) == {
        "lr": 0.5,
        "initial_lr": 1.0,
    }


def test_a_snapshot_is_not_changed_with_the_settings():
    settings = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99)}
    kept = snapshot(settings)
    settings["lr"].fill_(0.25)
    assert (kept["lr"].item(), kept["betas"]) == (0.5, (0.9, 0.99))
    assert not same(settings["lr"], kept["lr"])


@pytest.mark.parametrize(
    ("value", "sent", "expected"),
    [
        (0.5, 0.5, True),
        (0.5, 0.25, False),
        (None, False, False),
        (torch.tensor(0.5), torch.tensor(0.5), True),
        (torch.tensor(0.5), 0.5, False),
        ((0.9, 0.99), (0.9, 0.99), True),
    ],
)
def test_equal_settings(value, sent, expected):
    assert same(value, sent) is expected


def test_no_group_is_a_single_tensor_or_empty():
    with pytest.raises(TypeError, match="got a single Tensor"):
        groups_of(torch.ones(1))
    with pytest.raises(ValueError, match="empty parameter list"):
        groups_of(iter(()))
    with pytest.raises(TypeError, match=r"takes references .* got torch.FloatTensor"):
        groups_of([{"params": (torch.ones(1),)}])
