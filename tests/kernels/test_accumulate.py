"""The torch twin against NumPy, the CUDA text against the compiler, and on a GPU the kernel against the twin."""

import shutil
import subprocess

import numpy as np
import pytest
import torch

from mpidist.errors import KernelError
from mpidist.kernels import load
from mpidist.kernels.accumulate import accumulate, twin

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [0, 1, 3, 255, 256, 257, 100_003]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_products_and_sums_are_rounded_once(dtype, numel):
    y, x = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
    wide = np.float64 if dtype is torch.float64 else np.float32
    a = 0.37
    term = x.to(torch.float64 if dtype is torch.float64 else torch.float32).numpy() * wide(a)
    total = y.to(torch.float64 if dtype is torch.float64 else torch.float32).numpy() + term
    expected = torch.from_numpy(total).to(dtype)
    assert accumulate(y, x, a) is y
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("y", "x", "error"),
    [
        (torch.zeros(3), torch.zeros(4), ValueError),
        (torch.zeros(4, 2).t(), torch.zeros(8), ValueError),
        (torch.zeros(3), torch.zeros(3).double(), TypeError),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), TypeError),
    ],
)
def test_bad_arguments(y, x, error):
    with pytest.raises(error, match="accumulate needs"):
        accumulate(y, x)


def test_every_entry_point_that_is_asked_for_is_in_the_text():
    text = load.source("accumulate.cu")
    for name in ("float", "half", "bfloat16", "double"):
        assert f"accumulate_{name}(" in text


def test_an_unknown_source_is_named():
    with pytest.raises(KernelError, match=r"nothing\.cu"):
        load.source("nothing.cu")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("file", sorted(path.name for path in load.folder().glob("*.cu")))
def test_the_cuda_text_compiles(file, architecture, tmp_path):
    command = ["nvcc", f"-arch={architecture}", "-std=c++17", "-Werror", "all-warnings", "-cubin", "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, str(load.folder() / file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_the_kernel_has_the_twins_bits(dtype, numel):
    y, x = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
    expected = twin(y.clone(), x, 0.37)
    on_device = y.cuda()
    accumulate(on_device, x.cuda(), 0.37)
    assert torch.equal(on_device.cpu(), expected)
