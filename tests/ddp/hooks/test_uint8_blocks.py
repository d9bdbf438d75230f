"""Blocks quantized to uint8, against torch's observers and element by element."""

import math

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

from mpidist.ddp.hooks import uint8_blocks
from mpidist.ddp.hooks.uint8_blocks import average, heads_of, pack, packed_bytes


def packed(x, block):
    memory = torch.empty(packed_bytes(x.numel(), block), dtype=torch.uint8)
    pack(x, block, memory)
    return memory


@pytest.mark.parametrize("piece", [3, 8, 1 << 16])
@pytest.mark.parametrize(("numel", "block"), [(1, 1), (7, 3), (8, 4), (9, 9), (20, 6), (5, 2)])
def test_a_round_trip_is_within_half_a_step(monkeypatch, piece, numel, block):
    monkeypatch.setattr(uint8_blocks, "_PIECE_NUMEL", piece)
    parts = [torch.randn(numel) * 10**rank for rank in range(3)]
    out = torch.empty(numel)
    average(torch.stack([packed(part, block) for part in parts]), numel, block, out)
    for start in range(0, numel, block):
        own = slice(start, min(start + block, numel))
        steps = [(max(part[own].max(), 0) - min(part[own].min(), 0)) / 255 for part in parts]
        mean = torch.stack(parts).mean(0)[own]
        assert (out[own] - mean).abs().max() <= sum(steps) / 3 * 0.501


def test_scales_and_zero_points_are_those_of_torchs_observer():
    for x in (
        torch.randn(40),
        torch.rand(40) + 1,
        -torch.rand(40) - 1,
        torch.ones(4),
        torch.tensor([-3.0, 1e-3]),
    ):
        observer = torch.ao.quantization.MinMaxObserver()
        observer(x)
        expected = torch.tensor([float(value) for value in observer.calculate_qparams()])
        assert torch.allclose(heads_of(x, x.numel())[0], expected, rtol=1e-6)


def test_channels_are_torchs():
    x = torch.randn(4, 512) * torch.tensor([[1.0], [10], [0.1], [3]])
    observer = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(x)
    scales, zeros = observer.calculate_qparams()
    q = theirs._quantize_per_channel_backend(x, scales, zeros)
    expected = theirs._dequantize_per_channel_backend(q, scales, zeros)
    assert torch.allclose(dequantized(x.flatten(), 512), expected.flatten(), atol=1e-6)


def test_small_values_zeros_and_what_is_not_finite():
    small = torch.tensor([1e-9, -2e-9, 3e-9])  # torch rounds these to zero
    assert torch.allclose(dequantized(small), small, rtol=0.02)
    assert torch.equal(dequantized(torch.zeros(5)), torch.zeros(5))
    for bad in (math.inf, -math.inf, math.nan):
        out = dequantized(torch.tensor([1.0, bad, 2.0, 3.0]), block=2)
        assert out[:2].isnan().all() and torch.allclose(
            out[2:], torch.tensor([2.0, 3.0]), rtol=0.01
        )
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = torch.randn(9).to(dtype)
        assert torch.allclose(dequantized(x).to(dtype), x, atol=float(x.max() - x.min()) / 255)


def dequantized(x, block=None):
    block = block or x.numel()
    out = torch.empty(x.numel())
    average(packed(x, block)[None], x.numel(), block, out)
    return out
