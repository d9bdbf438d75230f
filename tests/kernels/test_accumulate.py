"""Accumulation y += a * x, by the twin, the CUDA source and the kernel, against NumPy."""

import numpy as np
import pytest
import torch

from mpidist.kernels.accumulate import accumulate

NARROW = [torch.float16, torch.bfloat16, torch.float32]
PAIRS = [(y, x) for y in NARROW for x in NARROW] + [(torch.float64, torch.float64)]
SIZES = [0, 1, 3, 255, 256, 257, 4096, 100_003]


def expected(y, x, a):
    wide = np.float64 if y.dtype is torch.float64 else np.float32
    of = torch.float64 if y.dtype is torch.float64 else torch.float32
    with np.errstate(all="ignore"):
        total = y.to(of).numpy() + x.to(of).numpy() * wide(a)
    return torch.from_numpy(total).to(y.dtype)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_products_and_sums_are_rounded_once(device, dtypes):
    for numel in SIZES:
        y, x = torch.randn(numel).to(dtypes[0]), torch.randn(numel).to(dtypes[1])
        on_device = y.to(device, copy=True)
        assert accumulate(on_device, x.to(device), 0.37) is on_device
        assert torch.equal(on_device.cpu(), expected(y, x, 0.37)), numel


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_any_alignment_is_accumulated_and_no_byte_beyond(device, dtypes):
    y, x = torch.randn(20_000).to(dtypes[0]), torch.randn(20_000).to(dtypes[1])
    for of_y, of_x, numel in [(1, 0, 9000), (3, 5, 9001), (2, 2, 8192), (7, 1, 5), (1, 9, 17_001)]:
        on_device = y.to(device, copy=True)
        accumulate(on_device[of_y : of_y + numel], x.to(device)[of_x : of_x + numel], -2)
        wanted = y.clone()
        wanted[of_y : of_y + numel] = expected(y[of_y : of_y + numel], x[of_x : of_x + numel], -2)
        assert torch.equal(on_device.cpu(), wanted), (of_y, of_x, numel)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_special_values(device, dtype):
    values = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 6e-8, 3e38, 1e-45, 65519.9, 65520.1]
    ).to(dtype)
    y = values.repeat_interleave(len(values)).to(device)
    x = values.repeat(len(values)).to(device)
    wanted = expected(y.cpu(), x.cpu(), 1)
    assert torch.equal(accumulate(y, x).cpu().nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize(
    ("y", "x", "error"),
    [
        (torch.zeros(3), torch.zeros(4), ValueError),
        (torch.zeros(4, 2).t(), torch.zeros(8), ValueError),
        (torch.zeros(4), torch._neg_view(torch.zeros(4)), ValueError),
        (torch.zeros(3), torch.zeros(3).double(), TypeError),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), TypeError),
    ],
)
def test_wrong_tensors_are_refused(y, x, error):
    with pytest.raises(error, match=r"accumulate (needs|adds)"):
        accumulate(y, x)
