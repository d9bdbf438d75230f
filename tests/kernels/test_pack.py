"""Copies between many tensors and one buffer, by the twin, the CUDA source and the kernel."""

import numpy as np
import pytest
import torch

from mpidist.kernels import pack as pack_module
from mpidist.kernels.pack import in_memory_order, pack, table, unpack
from tests.kernels.conftest import use_cuda_text_on_the_cpu

NARROW = [torch.float16, torch.bfloat16, torch.float32]
PAIRS = [(tensor, flat) for tensor in NARROW for flat in NARROW] + [(torch.float64, torch.float64)]
OTHERS = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.float8_e5m2]
SHAPES = [(3,), (), (0,), (17, 5), (64, 64), (1,), (4097,), (130, 33), (2, 3, 5, 7)]


def values(dtype, device, shapes=SHAPES):
    made = [(torch.randn(shape) * 50).to(dtype).to(device) for shape in shapes]
    return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in made]


def flat_of(tensors, dtype, scale):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return torch.cat([in_memory_order(t).cpu().to(wide) * scale for t in tensors]).to(dtype)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_packed_and_unpacked_values_are_scaled_and_cast(device, dtypes):
    tensors = values(dtypes[0], device)
    numel = sum(t.numel() for t in tensors)
    for scale in (1.0, 0.3):
        flat = torch.full((numel,), 9.0).to(dtypes[1]).to(device)
        assert pack(tensors, flat, scale) is flat
        assert torch.equal(flat.cpu(), flat_of(tensors, dtypes[1], scale))
        back = [torch.empty_like(t) for t in tensors]
        unpack(flat, back, 1 / scale)
        wide = torch.float64 if dtypes[1] is torch.float64 else torch.float32
        factor = np.float64(1 / scale) if wide is torch.float64 else np.float32(1 / scale)
        wanted = (flat.cpu().to(wide).numpy() * factor).astype(np.float64)
        got = torch.cat([in_memory_order(t).cpu() for t in back])
        assert torch.equal(got, torch.from_numpy(wanted).to(wide).to(dtypes[0]))


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_any_other_type_moves_as_it_is(device, dtype):
    tensors = values(dtype, device)
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=device)
    pack(tensors, flat)
    back = [torch.zeros_like(t) for t in tensors]
    unpack(flat, back)
    for mine, theirs in zip(tensors, back, strict=True):
        mine, theirs = mine.cpu(), theirs.cpu()
        if dtype is torch.float8_e5m2:
            mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_any_alignment_is_copied_and_no_byte_beyond(device, dtype):
    memory = torch.randn(60_000).to(dtype).to(device)
    places = [(1, 5000), (5003, 9001), (20_001, 3), (20_006, 20_000), (50_000, 1), (50_008, 4096)]
    tensors = [memory[start : start + numel] for start, numel in places]
    numel = sum(n for _, n in places)
    for offset in (0, 1, 2, 3, 5, 7):
        held = torch.full((numel + 20,), 7.0, dtype=dtype, device=device)
        pack(tensors, held[offset : offset + numel])
        assert torch.equal(held[offset : offset + numel].cpu(), flat_of(tensors, dtype, 1))
        assert bool((held[:offset] == 7).all()) and bool((held[offset + numel :] == 7).all())
        other = torch.full_like(memory, 3.0)
        unpack(held[offset : offset + numel], [other[start : start + n] for start, n in places])
        wanted = torch.full_like(memory, 3.0)
        for start, n in places:
            wanted[start : start + n] = memory[start : start + n]
        assert torch.equal(other, wanted)


def test_many_small_tensors_are_packed(device):
    tensors = [torch.full((numel % 7,), float(numel), device=device) for numel in range(600)]
    flat = torch.empty(sum(t.numel() for t in tensors), device=device)
    assert torch.equal(pack(tensors, flat).cpu(), flat_of(tensors, torch.float32, 1))


def test_empty_lists_and_tensors_are_packed(device):
    assert pack([], torch.empty(0, device=device)).numel() == 0
    unpack(torch.empty(0, device=device), [torch.empty(0, device=device)])


def test_parameters_are_copied_below_autograd(device):
    parameter = torch.nn.Parameter(torch.randn(5, 3, device=device))
    flat = pack([parameter], torch.empty(15, device=device))
    unpack(flat, [parameter], 2.0)
    assert not flat.requires_grad and torch.equal(parameter.detach().view(-1), flat * 2)


def test_the_table_describes_each_chunk():
    parts = [torch.empty(n) for n in (10, 0, 4096, 4097, 1)]
    ten, _, whole, long, one = (part.data_ptr() for part in parts)
    rows = table(parts, 4096)
    assert (
        rows[:, 0].tolist() == [ten, whole, long, long + 4 * 4096, one] and rows.dtype == np.int64
    )
    assert rows[:, 1].tolist() == [0, 10, 4106, 8202, 8203] and rows[:, 2].tolist() == [
        10,
        4096,
        4096,
        1,
        1,
    ]
    assert table([], 4096).shape == (0, 3)


def test_tensors_are_checked_when_they_first_come(monkeypatch):
    """The key has everything that the checks read: an address does not identify a tensor."""
    use_cuda_text_on_the_cpu(monkeypatch)
    checked = []
    check = pack_module._checked
    monkeypatch.setattr(
        pack_module, "_checked", lambda *args: (checked.append(args), check(*args))[1]
    )
    memory, flat = torch.randn(64), torch.empty(64)
    for _ in range(3):
        # Another buffer of the same kind needs no new table.
        for other in (flat, torch.empty(64)):
            pack([memory[:32].view(4, 8), memory[32:]], other)
            assert torch.equal(other, memory)
    assert len(checked) == 1
    # Dense in another order, and so the same elements.
    pack([memory[:32].view(4, 8).t(), memory[32:]], flat)
    unpack(flat, [memory[:48], memory[48:]])
    assert len(checked) == 3
    wrong = [
        ([memory[:32].as_strided((4, 8), (16, 1)), memory[32:]], flat, 1, ValueError),
        ([torch._neg_view(memory[:32].view(4, 8)), memory[32:]], flat, 1, ValueError),
        ([memory[:32].view(4, 8), memory[32:]], torch._neg_view(flat), 1, ValueError),
        ([memory[:32].view(4, 8), memory[32:]], torch.empty(128)[::2], 1, ValueError),
        ([memory[:32].view(4, 8), memory[32:].view(torch.int32)], flat, 1, ValueError),
        ([memory[:32].view(4, 8), memory[32:]], flat.view(torch.int32), 1, TypeError),
    ]
    for _ in range(2):
        for tensors, into, scale, error in wrong:
            with pytest.raises(error):
                pack(tensors, into, scale)
    whole, into = torch.arange(8), torch.empty(8, dtype=torch.int64)
    pack([whole], into)
    with pytest.raises(TypeError):
        pack([whole], into, 2.0)
    conjugate = torch.zeros(4, dtype=torch.complex64)
    pack([conjugate], torch.empty_like(conjugate))
    with pytest.raises(ValueError, match="resolve_conj"):
        pack([conjugate.conj()], torch.empty_like(conjugate))


@pytest.mark.parametrize(
    ("tensors", "flat", "scale", "error", "words"),
    [
        ([torch.zeros(3)], torch.zeros(4), 1, ValueError, "3 elements"),
        ([torch.zeros(4)], torch.zeros(8)[::2], 1, ValueError, "contiguous"),
        ([torch.zeros(8)[::2]], torch.zeros(4), 1, ValueError, "not dense"),
        ([torch.zeros(1).expand(4)], torch.zeros(4), 1, ValueError, "not dense"),
        ([torch.zeros(2), torch.zeros(2).double()], torch.zeros(4), 1, ValueError, "one dtype"),
        ([torch.zeros(4)], torch.zeros(4).double(), 1, TypeError, "neither casts"),
        ([torch._neg_view(torch.zeros(4))], torch.zeros(4), 1, ValueError, "resolve_neg"),
        (
            [torch.zeros(4, dtype=torch.complex64).conj()],
            torch.zeros(4, dtype=torch.complex64),
            1,
            ValueError,
            "resolve_conj",
        ),
        ([torch.zeros(4).int()], torch.zeros(4).int(), 2, TypeError, "neither casts"),
    ],
)
def test_wrong_tensors_are_refused(tensors, flat, scale, error, words):
    with pytest.raises(error, match=words):
        pack(tensors, flat, scale)
