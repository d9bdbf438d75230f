"""Parameter groups: copied settings, compared rows, and errors."""

from __future__ import annotations

import functools

import pytest
import torch

from mpidist.zero.shards import groups
from mpidist.zero.shards.pieces import Piece

Parameter = torch.nn.Parameter


def test_settings_go_one_way_and_parameters_stay():
    source = [
        {"params": [1], "param_names": ["a"], "lr": 2.0},
        {"params": [], "lr": 3.0, "initial_lr": 1.0},
    ]
    target = [
        {"params": [5], "param_names": ["b"], "lr": 0.0, "deleted": 1},
        {"params": [6], "lr": 0.0},
    ]
    groups.sync(source, target)
    assert target == [
        {"params": [5], "param_names": ["b"], "lr": 2.0},
        {"params": [6], "lr": 3.0, "initial_lr": 1.0},
    ]
    assert groups.settings(source[0]) == {"lr": 2.0}
    with pytest.raises(ValueError, match="zip"):
        groups.sync(source, target[:1])


def test_pieces_find_their_groups_in_the_order_of_the_parameters():
    parameters = [Parameter(torch.ones(n)) for n in (1, 2, 3)]
    held = [{"params": parameters[:1]}, {"params": []}, {"params": parameters[1:]}]
    pieces = [Piece(number, parameters[number], 0, 1, parameters[number]) for number in (2, 0, 1)]
    found = groups.by_group(held, pieces)
    assert [[tensor.numel() for tensor in group] for group in found] == [[1], [], [2, 3]]


def test_equal_settings_have_equal_texts():
    def text(**settings):
        return groups.text({"params": [], "param_names": ["x"], **settings})

    assert (
        text(lr=0.1, betas=(0.9, 0.99))
        == text(betas=(0.9, 0.99), lr=0.1)
        != text(lr=0.1, betas=(0.9, 0.999))
    )
    assert text(lr=torch.tensor(0.5)) == text(lr=0.5) != text(lr=0.25)
    assert text(lr=0.1) != text(lr=0.1 + 2**-54) and text(lr=float("nan")) == text(lr=float("nan"))
    assert text(lr=1e-3) != text(lr="1e-3") and text(foreach=None) != text(foreach=False)
    assert text(betas=(torch.tensor(0.5), 0.9)) == text(betas=(0.5, 0.9))
    # Neither text may hold an address.
    for value in (object(), lambda ratio: ratio, functools.partial(max, 1), [object()]):
        assert "0x" not in text(adjust=value), text(adjust=value)
    assert text(adjust=max) != text(adjust=min)


def test_ranks_compare_shapes_dtypes_layouts_and_trainability():
    def rows(*parameters):
        return groups.rows([{"params": list(parameters), "lr": 1.0}])

    first = rows(Parameter(torch.ones(2, 3)))
    assert first == rows(Parameter(torch.zeros(2, 3)))
    others = [
        torch.ones(3, 2),
        torch.ones(2, 3).double(),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, device="meta"),
    ]
    for other in [*map(Parameter, others), Parameter(torch.ones(2, 3), requires_grad=False)]:
        assert rows(other) != first
    assert rows() != first


def test_memory_that_two_parameters_share_is_refused():
    one, empty = Parameter(torch.ones(6)), Parameter(torch.ones(0))
    groups.require_distinct(
        [
            {"params": [one, empty]},
            {"params": [Parameter(torch.ones(0)), Parameter(one.detach()[3:])]},
        ]
    )
    groups.require_distinct(
        [
            {
                "params": [
                    Parameter(torch.ones(3, device="meta")),
                    Parameter(torch.ones(3, device="meta")),
                ]
            }
        ]
    )
    with pytest.raises(ValueError, match="given twice"):
        groups.require_distinct([{"params": [one, empty, one]}])
    with pytest.raises(ValueError, match=r"shapes \(6,\) and \(2, 3\), lie in the same memory"):
        groups.require_distinct(
            [{"params": [one]}, {"params": [Parameter(one.detach().view(2, 3))]}]
        )


def test_one_copy_is_for_host_memory():
    groups.require_host_memory([{"params": [Parameter(torch.ones(3))]}])
    with pytest.raises(ValueError, match="some on meta"):
        groups.require_host_memory([{"params": [Parameter(torch.ones(3, device="meta"))]}])
