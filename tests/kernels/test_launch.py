"""Choice between a kernel and its torch twin. On a device: with ``make gpu``."""

from types import SimpleNamespace

import pytest

from mpidist.kernels import launch, load


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("is_available", [True, False])
def test_a_kernel_takes_tensors_of_a_device_that_has_it(monkeypatch, is_cuda, is_available):
    asked = []
    monkeypatch.setattr(load, "is_available", lambda index: asked.append(index) or is_available)
    tensor = SimpleNamespace(is_cuda=is_cuda, device=SimpleNamespace(index=3))
    assert launch.has_kernels(tensor) is (is_cuda and is_available)
    assert asked == [3] * is_cuda
