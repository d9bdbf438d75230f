"""Sharded gradient scaler: an infinite gradient on one rank skips the step on all."""

from __future__ import annotations

import pickle

import pytest
import torch

from mpidist.errors import DisagreementError
from mpidist.optim import OSS, ShardedGradScaler
from tests.tools.support import agree, raises_on_all
from tests.zero.models import Model, backward, unequal_parameters

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_steps_of_a_plain_scaler(group, partition):
    """Equal scales, norms and bits, if all ranks have all gradients."""
    results = []
    for scaler in (
        torch.amp.GradScaler("cpu", growth_interval=2),
        ShardedGradScaler("cpu", growth_interval=2),
    ):
        model = Model()
        if type(scaler) is ShardedGradScaler:
            optimizer = OSS(
                model.parameters(), torch.optim.Adam, group, lr=0.01, partition=partition
            )
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scales, norms = [], []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(torch.ones(1))
            backward(model, 0, step, scale=scaler.get_scale())
            if step == 1:
                model.last.weight.grad[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            if step != 1:
                clip = optimizer.clip_grad_norm if isinstance(optimizer, OSS) else None
                norms.append(
                    float(
                        clip(1e9)
                        if clip
                        else torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                    )
                )
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((model, scales, norms, scaler))
    (plain, scales, norms, scaler), (sharded, its_scales, its_norms, its) = results
    ok = scales == its_scales == [2.0**16, 2.0**15, 2.0**15, 2.0**16]
    ok &= all(abs(a - b) <= 1e-5 * a for a, b in zip(norms, its_norms, strict=True))
    ok &= (
        scaler.state_dict() == its.state_dict()
        and pickle.loads(pickle.dumps(its)).state_dict() == its.state_dict()
    )
    agree(
        group,
        ok and not unequal_parameters(sharded, plain),
        f"{its_scales} {norms} {its_norms} {unequal_parameters(sharded, plain)}",
    )


@pytest.mark.parametrize("is_sharded", [True, False])
def test_an_infinite_gradient_of_one_rank_skips_the_step_on_all(group, is_sharded):
    """Includes a rank without gradients, and a rank with an error."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(group.size)]
    made = (
        OSS(parameters, torch.optim.SGD, group, lr=1.0)
        if is_sharded
        else torch.optim.SGD(parameters, lr=1.0)
    )
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=group)
    for bad in (group.size - 1, None):
        scaler.scale(torch.ones(1))
        for place, parameter in enumerate(parameters):
            parameter.grad = (
                torch.full((4,), 4.0)
                if place == group.rank and place < max(group.size - 1, 1)
                else None
            )
        if group.rank == bad:
            parameters[bad].grad = torch.full((4,), float("nan"))
        scaler.step(made)
        scaler.update()
        stepped = any(
            bool(parameter.ne(1).any()) for parameter in parameters[: max(group.size - 1, 1)]
        )
        agree(
            group,
            scaler.get_scale() == 2.0
            and (is_sharded or group.rank == group.size - 1 > 0 or stepped == (bad is None)),
            "scale",
        )
    for parameter in parameters:
        parameter.grad = None
    scaler.scale(torch.ones(1))
    raises_on_all(group, AssertionError, lambda: scaler.step(made), "No inf checks")
    halves = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16))]
    its = torch.optim.SGD(halves, lr=1.0)
    halves[0].grad = torch.ones(2, dtype=torch.float16) if group.rank == 0 else None
    raises_on_all(
        group,
        ValueError if group.rank == 0 else DisagreementError,
        lambda: scaler.unscale_(its),
        "FP16",
    )
    off = ShardedGradScaler("cpu", enabled=False, process_group=group)
    assert off.state_dict() == {} and float(off.scale(torch.ones(()))) == 1.0
