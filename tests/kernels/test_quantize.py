"""Blockwise int8, by the twin, the CUDA source and the kernel, against NumPy."""

import numpy as np
import pytest
import torch

from mpidist.kernels import quantize as quantize_module
from mpidist.kernels.quantize import BLOCK, blocks_in, dequantize_add, quantize, quantize_change

SIZES = [0, 1, 63, 64, 255, 256, 257, 4096, 4097, 20_011]
TINY = np.finfo(np.float32).tiny
DTYPES = [torch.float32, torch.float64]


def expected(change):
    """Return q and scales, block by block, with each operation rounded by NumPy."""
    change = change.numpy()
    wide, q, scales = (
        change.dtype.type,
        np.zeros(change.shape, np.int8),
        np.zeros(blocks_in(change.size), np.float32),
    )
    with np.errstate(all="ignore"):
        for place in range(len(scales)):
            own = slice(place * BLOCK, (place + 1) * BLOCK)
            scale = np.float32(np.abs(change[own]).max() / wide(127))
            if np.isfinite(scale):
                q[own] = np.rint(change[own] * (wide(1) / wide(max(scale, TINY))))
            scales[place] = np.nan if not np.isfinite(scale) else scale if scale > TINY else 0
    return torch.from_numpy(q), torch.from_numpy(scales)


def made(numel, device):
    return torch.full((numel,), 99, dtype=torch.int8, device=device), torch.full(
        (blocks_in(numel),), 99.0, device=device
    )


def is_same(tensor, wanted):
    return torch.equal(tensor.cpu().nan_to_num(7777.0), wanted.nan_to_num(7777.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_change_is_rounded_by_blocks_and_added_again(device, dtype, monkeypatch):
    monkeypatch.setattr(quantize_module, "_PIECE_NUMEL", 4096)  # several pieces of the twin
    for numel in SIZES:
        master, flat = torch.randn(numel, dtype=dtype), torch.randn(numel, dtype=dtype)
        master *= torch.logspace(-6, 6, numel, dtype=dtype)
        q, scales = made(numel, device)
        quantize_change(master.to(device), flat.to(device), q, scales)
        wanted_q, wanted_scales = expected(master - flat)
        assert torch.equal(q.cpu(), wanted_q) and torch.equal(scales.cpu(), wanted_scales), numel
        alone_q, alone_scales = made(numel, device)
        quantize((master - flat).to(device), alone_q, alone_scales)
        assert torch.equal(alone_q, q) and torch.equal(alone_scales, scales), numel
        target = flat.to(device, copy=True)
        dequantize_add(target, q, scales)
        steps = wanted_scales.to(dtype).repeat_interleave(BLOCK)[:numel]
        assert torch.equal(target.cpu(), flat + wanted_q.to(dtype) * steps), numel
        # The error is half a step, plus the rounding of the sums.
        slack = 4 * torch.finfo(dtype).eps * (master.abs() + flat.abs())
        assert bool(((master - target.cpu()).abs() <= 0.5001 * steps + slack).all()), numel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_alignment_is_quantized_and_no_byte_beyond(device, dtype):
    x, base = torch.randn(9000, dtype=dtype), torch.randn(9000, dtype=dtype)
    for of_x, of_base, of_q, numel in [
        (1, 0, 0, 4096),
        (0, 3, 1, 4097),
        (2, 2, 3, 300),
        (7, 1, 2, 5),
        (4, 8, 4, 8192),
    ]:
        q, scales = made(9000, device)
        own = slice(of_q, of_q + numel), slice(1, 1 + blocks_in(numel))
        quantize_change(
            x.to(device)[of_x : of_x + numel],
            base.to(device)[of_base : of_base + numel],
            q[own[0]],
            scales[own[1]],
        )
        wanted_q, wanted_scales = made(9000, "cpu")
        wanted_q[own[0]], wanted_scales[own[1]] = expected(
            x[of_x : of_x + numel] - base[of_base : of_base + numel]
        )
        assert torch.equal(q.cpu(), wanted_q) and torch.equal(scales.cpu(), wanted_scales), (
            of_x,
            of_base,
            of_q,
            numel,
        )
        target = base.to(device, copy=True)
        dequantize_add(target[of_base : of_base + numel], q[own[0]], scales[own[1]])
        wanted = base.clone()
        steps = wanted_scales[own[1]].to(dtype).repeat_interleave(BLOCK)[:numel]
        wanted[of_base : of_base + numel] += wanted_q[own[0]].to(dtype) * steps
        assert torch.equal(target.cpu(), wanted), (of_x, of_base, of_q, numel)


def test_halves_go_to_the_even_integer(device):
    x = torch.arange(-127.0, 128.0, 0.5)[: 2 * BLOCK - 3]
    x[0] = x[BLOCK] = 127.0  # scale 1
    q, scales = made(x.numel(), device)
    quantize(x.to(device), q, scales)
    assert scales.tolist() == [1.0, 1.0] and torch.equal(q.cpu(), x.round().to(torch.int8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(device, dtype):
    blocks = {
        "zeros": [0.0, -0.0],
        "too small for a scale": [TINY, -100 * TINY, 1e-45],
        "the smallest scales": [200 * TINY, -3 * TINY],
        "the largest": [3e38, -3.4e38, 1e30],
        "NaN": [1.0, torch.nan, -2.0],
        "infinity": [1.0, torch.inf],
        "minus infinity": [-torch.inf, 5.0],
        "both": [-torch.inf, torch.inf, torch.nan],
        "too large for a scale": [1e300, 1.0],  # infinite in fp32
        "the last, not whole": [3.0, -1.0, 2.0],
    }
    x = torch.zeros(len(blocks) * BLOCK - 200, dtype=dtype)
    for place, values in enumerate(blocks.values()):
        x[place * BLOCK + 7 : place * BLOCK + 7 + len(values)] = torch.tensor(
            values, dtype=torch.float64
        ).to(dtype)
    q, scales = made(x.numel(), device)
    quantize(x.to(device), q, scales)
    wanted_q, wanted_scales = expected(x)
    assert torch.equal(q.cpu(), wanted_q) and is_same(scales, wanted_scales)
    scale_of = dict(zip(blocks, scales.tolist(), strict=True))
    assert (
        scale_of["zeros"]
        == scale_of["too small for a scale"]
        == 0
        < scale_of["the smallest scales"]
    )
    assert [name for name, scale in scale_of.items() if scale != scale] == list(blocks)[4:9]
    target = torch.ones(x.numel(), dtype=dtype, device=device)
    dequantize_add(target, q, scales)
    wanted = 1 + wanted_q.to(dtype) * wanted_scales.to(dtype).repeat_interleave(BLOCK)[: x.numel()]
    assert is_same(target, wanted)
    assert bool(target[4 * BLOCK : 9 * BLOCK].isnan().all()) and not bool(
        target[: 4 * BLOCK].isnan().any()
    )


def test_subnormal_sums_are_kept(device):
    """CuPy compiles with -ftz=true, but ranks with kernels must agree with ranks with the twin."""
    target = torch.full((BLOCK,), 3e-45, device=device)
    dequantize_add(
        target,
        torch.full_like(target, -3, dtype=torch.int8),
        torch.full((1,), 1e-40, device=device),
    )
    wanted = torch.full((BLOCK,), 3e-45) + torch.tensor(-3.0) * torch.tensor(1e-40)
    assert torch.equal(target.cpu(), wanted) and wanted[0] != 0


def floats(numel, dtype=torch.float32):
    return torch.zeros(numel, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "q", "scales", "error"),
    [
        (floats(300), floats(299, torch.int8), floats(2), ValueError),
        (floats(300), floats(300, torch.int8), floats(1), ValueError),
        (floats(600)[::2], floats(300, torch.int8), floats(2), ValueError),
        (torch._neg_view(floats(300)), floats(300, torch.int8), floats(2), ValueError),
        (floats(300, torch.bfloat16), floats(300, torch.int8), floats(2), TypeError),
        (floats(300, torch.complex64), floats(300, torch.int8), floats(2), TypeError),
        (floats(300), floats(300, torch.uint8), floats(2), TypeError),
        (floats(300), floats(300, torch.int8), floats(2, torch.float64), TypeError),
    ],
)
def test_wrong_tensors_are_refused(x, q, scales, error):
    for name, call in (("quantize", quantize), ("dequantize_add", dequantize_add)):
        with pytest.raises(error, match=rf"{name} (needs|reads)"):
            call(x, q, scales)
    with pytest.raises(error, match=r"quantize_change (needs|reads)"):
        quantize_change(x, x, q, scales)


def test_two_tensors_of_one_kind():
    with pytest.raises(TypeError, match="quantize_change needs"):
        quantize_change(floats(8), floats(8, torch.float64), floats(8, torch.int8), floats(1))
