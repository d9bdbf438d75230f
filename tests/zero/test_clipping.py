"""Norm of all ranks' gradients, compared with torch's, and the scaled gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mpidist.errors import DisagreementError
from mpidist.zero import clipping
from mpidist.zero.optimizer import OSS
from tests.tools.support import agree, raises_on_all
from tests.tools.transfers import CUDA, counted, no_waits
from tests.zero import nets

pytestmark = pytest.mark.mpi

Parameter = torch.nn.Parameter


def pair(group, kind, dtypes=(torch.float32, torch.float64, torch.bfloat16)):
    """Return an optimizer whose parameters have gradients, and equal parameters for torch."""
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        tensors = [
            torch.randn(shape).to(dtypes[place % len(dtypes)])
            for place, shape in enumerate([(7, 11), (), (300,), (9, 14)])
        ]
        parameters = [
            Parameter(tensor) for tensor in [*tensors, torch.randn(4, 6).t(), torch.randn(3)]
        ]
        for number, parameter in enumerate(parameters[:-1]):
            # The last parameter but one has a gradient of another memory order.
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype) * (10.0 + number)
        made.append(parameters)
    return OSS(made[0], torch.optim.SGD, group, partition=kind, lr=0.5), *made


@pytest.mark.parametrize("kind", ["greedy", "flat"])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf, "inf"])
def test_norm_and_step_are_torchs(group, kind, norm_type):
    # torch rounds the norm to bf16.
    wide, narrow = (torch.float32, torch.float64), (torch.bfloat16, torch.float64)
    for max_norm, dtypes, tolerance in ((1e-3, wide, 1e-5), (1.0, narrow, 1e-2), (1e9, wide, 1e-5)):
        sharded, own, other = pair(group, kind, dtypes)
        norm = sharded.clip_grad_norm(max_norm, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(other, max_norm, float(norm_type))
        agree(group, norm.dtype is torch.float64 and norm.shape == (), str(norm.dtype))
        agree(group, torch.allclose(norm, expected.double(), rtol=tolerance), f"{norm} {expected}")
        agree(group, len(set(group.all_gather_object(float(norm)))) == 1)
        sharded.step()
        torch.optim.SGD(other, lr=0.5).step()
        close = [
            torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
            for a, b in zip(own, other, strict=True)
        ]
        agree(group, all(close), f"{max_norm} {close}")


@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_gradients_that_are_no_numbers_spread_as_torchs_do(group, kind):
    for value, norm_type in (
        (math.nan, 2.0),
        (math.nan, math.inf),
        (math.inf, 2.0),
        (math.inf, math.inf),
    ):
        sharded, own, other = pair(group, kind, (torch.float32,))
        for parameters in (own, other):
            parameters[2].grad[150] = value
        norm, expected = (
            sharded.clip_grad_norm(1.0, norm_type),
            torch.nn.utils.clip_grad_norm_(other, 1.0, norm_type),
        )
        agree(
            group,
            (norm.dtype is torch.float32 and torch.equal(norm, expected))
            or bool(norm.isnan() and expected.isnan()),
        )
        sharded.step()
        torch.optim.SGD(other, lr=0.5).step()
        same = [
            torch.allclose(a, b, equal_nan=True, atol=1e-6) for a, b in zip(own, other, strict=True)
        ]
        agree(group, all(same), f"{value} {norm_type} {same}")


def test_gradients_that_appear_later_count_and_filters_choose(group):
    sharded, own, other = pair(group, "greedy", (torch.float32,))
    sharded.clip_grad_norm(1e9)
    own[5].grad = other[5].grad = torch.full((3,), 100.0)
    expected = torch.nn.utils.get_total_norm([p.grad for p in other])
    agree(group, torch.allclose(sharded.clip_grad_norm(1e9), expected))
    chosen = sharded.clip_grad_norm(
        1.0, filter_params_fn=lambda parameters: (p for p in parameters if p is own[5])
    )
    agree(group, torch.allclose(chosen, torch.tensor(3 * 100.0**2).sqrt()))
    rest = [parameter for parameter in own if parameter is not own[5]]
    agree(
        group,
        all(torch.equal(a.grad, b.grad) for a, b in zip(rest, other, strict=False)),
        "others were scaled",
    )
    agree(group, float(sharded.clip_grad_norm(1.0, filter_params_fn=lambda parameters: [])) == 0)
    sharded.zero_grad()
    agree(
        group,
        float(sharded.clip_grad_norm(1.0)) == 0
        and float(sharded.clip_grad_norm(1.0, math.inf)) == 0,
    )


@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_complex_sparse_and_frozen_gradients_and_an_empty_group(group, kind):
    torch.manual_seed(0)
    parameters = [
        Parameter(torch.randn(17, dtype=torch.complex64)),
        Parameter(torch.randn(90)),
        Parameter(torch.randn(3, 3)),
    ]
    parameters[2].requires_grad_(False)
    sharded = OSS(
        [{"params": []}, {"params": parameters}], torch.optim.SGD, group, partition=kind, lr=0.1
    )
    for parameter in parameters[:2]:
        parameter.grad = torch.randn_like(parameter)
    parameters[2].grad = torch.ones(3, 3)
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters[:2]])
    agree(group, torch.allclose(sharded.clip_grad_norm(0.5), expected))
    table = torch.nn.Embedding(10, 3, sparse=True)
    sparse = OSS(table.parameters(), torch.optim.SGD, group, lr=0.1)
    table(torch.tensor([1, 1, 4])).sum().backward()
    agree(group, torch.allclose(sparse.clip_grad_norm(1.0), torch.tensor(15.0).sqrt()))
    if sparse._shards.owners[0] == group.rank:
        norm = table.weight.grad.coalesce().values().norm()
        assert torch.allclose(norm, torch.tensor(1.0), atol=1e-3)


def test_a_refusal_of_one_rank_raises_on_all(group):
    sharded, _, _ = pair(group, "greedy")

    def broken(parameters):
        if group.rank == group.size - 1:
            raise KeyError("my own filter")
        return parameters

    caught = None
    try:
        sharded.clip_grad_norm(1.0, filter_params_fn=broken)
    except (KeyError, DisagreementError) as error:
        caught = error
    kind = KeyError if group.rank == group.size - 1 else DisagreementError
    agree(group, isinstance(caught, kind) and "my own filter" in str(caught), repr(caught))
    for arguments in ((1.0, 0), (1.0, -2), (math.nan,), (1.0, "two")):
        raises_on_all(
            group, ValueError, lambda arguments=arguments: sharded.clip_grad_norm(*arguments)
        )
    if group.size > 1:
        words = (
            "norm_type > 0"
            if group.rank == 0
            else "OSS.clip_grad_norm was refused. rank 0: ValueError"
        )
        raises_on_all(
            group, Exception, lambda: sharded.clip_grad_norm(1.0, group.rank * 2.0), words
        )
    agree(group, float(sharded.clip_grad_norm(1.0)) > 1)


def test_the_norm_is_over_the_group_and_not_the_world(world):
    half = world.split(world.rank % 2)
    sharded, _, other = pair(half, "greedy", (torch.float32,))
    for parameter in nets.all_parameters(sharded)[:-1]:
        parameter.grad *= 1 + world.rank % 2
    if world.rank % 2 == 0:  # other ranks train without clipping
        expected = torch.nn.utils.get_total_norm([p.grad for p in other if p.grad is not None])
        agree(half, torch.allclose(sharded.clip_grad_norm(1.0), expected))
    world.barrier()
    half.close()


class Alone:
    """A group of one rank."""

    def all_reduce(self, tensor, op):
        """Leave the tensor as it is."""


def owned(gradients):
    return [(SimpleNamespace(put_back=lambda gradient: None), each) for each in gradients]


def some(number, device, dtypes=(torch.float32, torch.bfloat16)):
    return [
        torch.ones(place % 7 + 1, device=device).to(dtypes[place % len(dtypes)])
        for place in range(number)
    ]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_norm_and_gradients_have_the_bits_of_one_gradient_after_the_other(norm_type):
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    torch.manual_seed(1)
    gradients = [torch.randn(place * 97).to(dtypes[place % 5]) for place in range(40)]
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    norms = torch.stack(
        [
            torch.linalg.vector_norm(each, norm_type, dtype=wide.get(each.dtype)).double()
            for each in gradients
            if each.numel()
        ]
    )
    is_max = math.isinf(norm_type)
    expected = norms.max() if is_max else (norms**norm_type).sum() ** (1 / norm_type)
    scale = (1.5 / (expected + 1e-6)).clamp(max=1.0)
    scaled = [
        each * scale.to(each.dtype.to_real() if each.is_complex() else each.dtype)
        for each in gradients
    ]
    norm = clipping.clip(Alone(), owned(gradients), 1.5, norm_type, torch.device("cpu"))
    assert torch.equal(norm, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, scaled, strict=True))


def test_the_launches_do_not_grow_with_the_number_of_gradients():
    totals = []
    for number in (4, 100):
        with counted() as counts:
            gradients = some(number, CUDA)
            counts.launches.clear()
            clipping.clip(Alone(), owned(gradients), 1.0, 2.0, CUDA)
            totals.append(counts.launches.total())
            assert counts.down == counts.up == []
    assert totals[0] == totals[1]


@pytest.mark.gpu
def test_clipping_on_a_gpu_waits_for_nothing():
    gradients = some(100, CUDA)
    with no_waits():
        norm = clipping.clip(Alone(), owned(gradients), 1.0, 2.0, CUDA)
    host = some(100, "cpu")
    torch.testing.assert_close(
        norm.cpu(), clipping.clip(Alone(), owned(host), 1.0, 2.0, torch.device("cpu"))
    )
    for one, other in zip(gradients, host, strict=True):
        torch.testing.assert_close(one.cpu(), other)
