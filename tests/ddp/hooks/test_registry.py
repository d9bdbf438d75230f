"""Registry of hooks: every type of torch's has a counterpart that registers an averaging hook."""

import pytest
import torch
from torch.distributed.algorithms import ddp_comm_hooks as theirs

from mpidist.ddp.hooks.registry import DDPCommHookType, register_ddp_comm_hook
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree, raises_on_all

TOLERANCE = {
    "ALLREDUCE": 1e-5,
    "FP16_COMPRESS": 1e-2,
    "BF16_COMPRESS": 5e-2,
    "QUANTIZE_PER_TENSOR": 5e-2,
}


def test_names_are_torchs():
    assert [one.name for one in DDPCommHookType] == [one.name for one in theirs.DDPCommHookType]


@pytest.mark.mpi
@pytest.mark.usefixtures("device")
def test_each_type_registers_its_hook(group):
    def gradients(kind):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(16, 8), process_group=group)
        if kind is not None:
            register_ddp_comm_hook(kind, ddp, group)
        ddp(
            torch.randn(3, 16, generator=torch.Generator().manual_seed(group.rank))
        ).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in ddp.module.parameters()])

    expected = gradients(None)
    for kind in DDPCommHookType:
        got = gradients(kind)
        # PowerSGD averages uncompressed for its first 1000 steps.
        if kind is not DDPCommHookType.NOOP:
            near = torch.allclose(
                got, expected, atol=TOLERANCE.get(kind.name, 5e-2) * float(expected.abs().max())
            )
            agree(group, near, kind.name)
    agree(
        group,
        group.size == 1 or not torch.allclose(got, expected),
        "the last type leaves gradients alone",
    )
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    raises_on_all(group, TypeError, lambda: register_ddp_comm_hook("NOOP", ddp), "DDPCommHookType")
    raises_on_all(
        group,
        TypeError,
        lambda: register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, ddp, 3),
        "needs a group of mpidist",
    )
