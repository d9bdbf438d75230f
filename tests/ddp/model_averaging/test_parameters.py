"""Averages of parameters in place, against the mean over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import utils as theirs

from mpidist.ddp.model_averaging import parameters
from mpidist.ddp.model_averaging.parameters import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from mpidist.errors import DisagreementError
from tests.support import agree, raises_on_all


def made(rank):
    torch.manual_seed(0)
    base = [
        torch.randn(3, 4),
        torch.randn(5, dtype=torch.float64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    base += [torch.randn(6, dtype=torch.bfloat16), torch.randn(4, 6).t(), torch.zeros(0, 2)]
    return [torch.nn.Parameter(tensor + rank) for tensor in base]


def test_parameters_with_a_gradient_are_chosen():
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    one.grad = torch.zeros(1)
    groups = [{"params": [two, one]}, {"params": [two]}]
    for params in (iter([one, two]), groups, torch.optim.SGD([one, two], lr=1)):
        assert get_params_to_average(params) == [one]
    assert get_params_to_average(groups) == theirs.get_params_to_average(groups)
    with pytest.raises(NotImplementedError, match="got str"):
        get_params_to_average(["weight"])


@pytest.mark.mpi
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("batch_bytes", [64 << 20, 64])
def test_averages_in_place(group, batch_bytes, monkeypatch):
    monkeypatch.setattr(parameters, "_BATCH_BYTES", batch_bytes)
    held, expected = made(group.rank), made((group.size - 1) / 2)
    views = [p.detach() for p in held]
    average_parameters(iter(held), group)
    for parameter, view, want in zip(held, views, expected, strict=True):
        agree(
            group,
            parameter.data_ptr() == view.data_ptr() and parameter.stride() == want.stride(),
            "other memory",
        )
        tolerance = 5e-2 if want.dtype is torch.bfloat16 else 1e-6
        agree(
            group,
            torch.allclose(parameter, want, atol=tolerance),
            f"{want.dtype} {tuple(want.shape)}",
        )


@pytest.mark.mpi
@pytest.mark.usefixtures("device")
def test_a_gradient_on_any_rank_counts_and_differences_are_errors(group):
    def averaged(has_gradient):
        weight = torch.nn.Parameter(torch.full((3,), float(group.rank)))
        other = torch.nn.Parameter(torch.full((2,), float(group.rank)))
        weight.grad = torch.ones(3) if has_gradient else None
        average_parameters_or_parameter_groups([{"params": [weight, other]}], group)
        return weight.detach(), other.detach()

    mean = (group.size - 1) / 2
    weight, other = averaged(group.rank == 0)
    agree(group, bool((weight == mean).all() and (other == group.rank).all()))
    weight, _ = averaged(False)
    agree(group, bool((weight == group.rank).all()), "no gradient anywhere")
    average_parameters_or_parameter_groups([], group)
    raises_on_all(
        group,
        TypeError,
        lambda: average_parameters([torch.zeros(1)], "gloo"),
        "needs a group of mpidist",
    )
    average_parameters([torch.zeros(1)], dist.GroupMember.NON_GROUP_MEMBER)
    sparse = [torch.zeros(3).to_sparse()]
    raises_on_all(group, TypeError, lambda: average_parameters(sparse, group), "dense")
    if group.size > 1:
        uneven = [torch.zeros(group.rank + 1)]
        raises_on_all(
            group,
            DisagreementError,
            lambda: average_parameters(uneven, group),
            "parameter 0: rank 0: (1,)",
        )
        other = [torch.zeros(2, dtype=torch.float64 if group.rank else torch.float32)]
        raises_on_all(
            group,
            DisagreementError,
            lambda: average_parameters(other, group),
            "rank 1: (2,) torch.float64",
        )
        turned = [torch.zeros(2), torch.zeros(3)][:: -1 if group.rank else 1]
        raises_on_all(
            group, DisagreementError, lambda: average_parameters(turned, group), "parameter 0"
        )
        refused = ["weight"] if group.rank else [torch.zeros(1)]
        kind = NotImplementedError if group.rank else DisagreementError
        raises_on_all(
            group, kind, lambda: average_parameters_or_parameter_groups(refused, group), "got str"
        )
        uneven = [torch.zeros(1)] * (group.rank + 1)
        raises_on_all(
            group,
            DisagreementError,
            lambda: average_parameters_or_parameter_groups(uneven, group),
            "the same parameters",
        )
