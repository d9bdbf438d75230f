"""Stream order of gradients between threads: recorded events, and streams that wait for them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mpidist.autograd import fence as module
from mpidist.autograd.fence import Fence


class Device:
    """Records events and waits."""

    def __init__(self, log, name):
        self.log, self.name, self.made = log, name, 0

    def record_current_stream(self):
        self.made += 1
        event = f"{self.name}/{self.made}"
        self.log.append(f"record {event}")
        return SimpleNamespace(block_current_stream=lambda: self.log.append(f"hold {event}"))


def on(index):
    return SimpleNamespace(is_cpu=False, is_cuda=True, device=torch.device("cuda", index))


def test_the_last_place_of_each_device_is_held(monkeypatch):
    log: list[str] = []
    devices = {index: Device(log, f"cuda{index}") for index in range(2)}
    monkeypatch.setattr(module, "device_at", lambda device: devices[device.index])
    monkeypatch.setattr(
        module, "used_here", lambda tensor: log.append(f"used {tensor.device.index}")
    )
    fence = Fence([on(0), None, torch.ones(1), on(1)])
    fence.record([on(0)])
    assert log == ["record cuda0/1", "record cuda1/1", "record cuda0/2"]
    log.clear()
    fence.block_current_streams([on(1), None])
    assert sorted(log[:2]) == ["hold cuda0/2", "hold cuda1/1"] and log[2:] == ["used 1"]


def test_host_tensors_record_no_event(monkeypatch):
    monkeypatch.setattr(module, "device_at", lambda device: 1 / 0)
    fence = Fence([torch.ones(1), None])
    fence.record([torch.ones(2)])
    fence.block_current_streams([torch.ones(1)])
