"""Places of tensors for tests of device memory: the lazy device, and CUDA."""

from __future__ import annotations

import torch

from mpidist.comm.execution import execution, fast_path
from mpidist.comm.memory import buffer
from mpidist.comm.messages import device_p2p, direct_messages
from tests.comm.lazy_device import LazyDevice

SLOW_CYCLES = 4_000_000  # about 2 ms


class Lazy:
    """Tensors on the lazy device: their values are work on the current stream."""

    def __init__(self, monkeypatch, seed):
        self.device = LazyDevice(seed)
        for module in (execution, device_p2p):
            monkeypatch.setattr(
                module, "device_of", lambda tensors: self.device if list(tensors) else None
            )
        monkeypatch.setattr(
            execution, "device_at", lambda device: self.device if device is not None else None
        )
        monkeypatch.setattr(buffer, "is_direct", lambda *tensors: False)
        # The fast path would use the host memory directly.
        monkeypatch.setattr(fast_path, "_flat", lambda *args: None)
        monkeypatch.setattr(fast_path.FastPath, "find", lambda path, tensor, op: None)
        monkeypatch.setattr(direct_messages.DirectMessages, "take", lambda direct, *args: False)

    def produce(self, value):
        tensor = torch.full_like(value, 77)
        self.device.current().do(lambda: tensor.copy_(value))
        return tensor

    def blank(self, like):
        return torch.full_like(like, 55)

    def read_later(self, tensor):
        values = []
        self.device.current().do(lambda: values.append(tensor.clone()))
        return lambda: values[0]

    def consume(self, function):
        seen = []
        self.device.current().do(lambda: seen.append(function()))
        self.device.current().record().synchronize()
        return seen[0]


class Cuda:
    """Tensors on the GPU, with a slow kernel before each value."""

    def produce(self, value):
        tensor = torch.full_like(value, 77, device="cuda")
        held = value.cuda()
        torch.cuda._sleep(SLOW_CYCLES)
        return tensor.copy_(held)

    def blank(self, like):
        return torch.full_like(like, 55, device="cuda")

    def read_later(self, tensor):
        torch.cuda._sleep(SLOW_CYCLES)
        values = tensor.clone()
        return lambda: values

    def consume(self, function):
        result = function()
        return [t.cpu() for t in result] if isinstance(result, list) else result.cpu()


def contribution(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, (numel,), generator=generator).to(dtype)
