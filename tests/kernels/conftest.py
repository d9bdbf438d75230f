"""Places where kernel tests run: torch twin, CUDA source on the CPU, or kernel on a GPU."""

from __future__ import annotations

import pytest
import torch

from mpidist.kernels import accumulate, launch, load, pack, powersgd, powersgd_launches
from tests.kernels import host


def use_cuda_text_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...] = ()
) -> list[str]:
    """Launch kernels on CPU tensors through the shim; return a list that receives their names.

    Args:
        own: Macros for all of them.
    """
    launched: list[str] = []

    def on_the_cpu(file, name, device, blocks, args, threads=launch.THREADS, defines=()):
        launched.append(name)
        host.run(file, name, blocks, args, threads, (*defines, *own))

    for module in (accumulate, pack, powersgd):
        monkeypatch.setattr(module, "has_kernels", lambda tensor: True)
    for module in (accumulate, pack, powersgd_launches):
        monkeypatch.setattr(module, "launch", on_the_cpu)
    return launched


@pytest.fixture(params=["twin", "text", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> torch.device:
    """Return the device for tensors; the functions then use this parameter's implementation."""
    if request.param == "cuda":
        assert load.is_available(0), "CuPy is missing"
        return torch.device("cuda", 0)
    if request.param == "text":
        use_cuda_text_on_the_cpu(monkeypatch)
    return torch.device("cpu")
