"""Checkpoints on CUDA devices: the device's generator, and state in pinned host memory."""

from __future__ import annotations

import pytest
import torch

from mpidist import checkpoint
from mpidist.ddp import DistributedDataParallel
from mpidist.optim import OSS
from tests.tools.support import agree, busy

pytestmark = pytest.mark.mpi(min_size=2)


class WithTable(torch.nn.Module):
    """Dropout, whose mask comes from the device's generator, and a table in pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(12, 5).to(device)
        table = torch.zeros(7)
        self.register_buffer("table", table.pin_memory() if device.type == "cuda" else table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table += 1
        return torch.nn.functional.dropout(self.inner(x), 0.5)


def trained(module, optimizer, steps, rank, device):
    for step in steps:
        optimizer.zero_grad()
        busy(device)
        generator = torch.Generator().manual_seed(97 * step + rank)
        module(torch.randn(4, 12, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return [value.clone() for value in module.module.state_dict().values()]


@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=str)
def test_a_run_goes_on_with_the_devices_numbers_and_in_the_memory_it_had(
    group, target, tmp_path, settings
):
    folder = group.broadcast_object(str(tmp_path), 0)
    model = WithTable(target)
    # A buffer on the host beside parameters on the device.
    module = DistributedDataParallel(model, process_group=group, forward_sync_buffers=False)
    optimizer = OSS(
        model.parameters(), torch.optim.Adam, group, partition="flat", lr=1e-2, **settings
    )
    trained(module, optimizer, range(2), group.rank, target)
    checkpoint.save(folder, 2, model=module, optimizer=optimizer)
    wanted = trained(module, optimizer, range(2, 5), group.rank, target)
    drawn = torch.randn(5, device=target), torch.randn(5)
    memory = model.table.data_ptr()
    checkpoint.load(folder, model=module, optimizer=optimizer)
    found = trained(module, optimizer, range(2, 5), group.rank, target)
    again = torch.randn(5, device=target), torch.randn(5)
    wrong = [place for place, pair in enumerate(zip(found, wanted, strict=True)) if differ(*pair)]
    agree(group, not wrong, f"state {wrong}")
    agree(group, all(map(torch.equal, drawn, again)), "generators")
    is_kept = model.table.data_ptr() == memory
    agree(group, is_kept and model.table.is_pinned() == (target.type == "cuda"), "pinned memory")


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device != other.device or not torch.equal(one, other)
