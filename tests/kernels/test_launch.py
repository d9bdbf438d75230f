"""Choice between a kernel and its torch twin. On a device: with ``make gpu``."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from mpidist.kernels import launch, load


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("is_available", [True, False])
def test_a_kernel_takes_tensors_of_a_device_that_has_it(monkeypatch, is_cuda, is_available):
    asked = []
    monkeypatch.setattr(load, "is_available", lambda index: asked.append(index) or is_available)
    tensor = SimpleNamespace(is_cuda=is_cuda, device=SimpleNamespace(index=3))
    assert launch.has_kernels(tensor) is (is_cuda and is_available)
    assert asked == [3] * is_cuda


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_kernels_compute_in_fp32_or_fp64(dtype, wide):
    assert launch.compute_dtype(dtype) is wide
    factor = launch.scalar(0.1, dtype)
    assert factor.itemsize == wide.itemsize and factor == factor.dtype.type(0.1)
    assert launch.chunk_numel(torch.float16, dtype) == launch.CHUNK_BYTES // dtype.itemsize


def test_blocks_of_items_follow_each_other():
    first, items = launch.blocks_of([2, 0, 3])
    assert first.tolist() == [0, 2, 2] and items.tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("current", [1, 3])
def test_a_kernel_is_queued_once_on_the_tensors_device(monkeypatch, current):
    queued, entered = [], []

    def kernel(blocks, threads, arguments, stream):
        queued.append((blocks, threads, arguments, stream.ptr, tuple(entered)))

    @contextlib.contextmanager
    def current_device(index):
        entered.append(index)
        yield

    def function(*named):
        assert named == ("pack.cu", "pack", 3, ("A=1",))
        return kernel

    monkeypatch.setattr(load, "function", function)
    monkeypatch.setattr(load, "current_device", current_device)
    monkeypatch.setattr(launch, "stream_of", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    device = SimpleNamespace(index=3, type="cuda")
    launch.launch("pack.cu", "pack", device, 5, [1, 2], threads=64, defines=["A=1"])
    assert queued == [((5,), (64,), (1, 2), 77, () if current == 3 else (3,))]
