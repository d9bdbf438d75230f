"""Chunks, compared with the elements themselves in every order of memory."""

import random

import torch

from mpidist.zero.shards.flat_buffers import in_memory_order
from mpidist.zero.state.chunks import chunks_of, view_of


def test_chunks_hold_the_elements_of_the_run_and_no_others():
    chosen = random.Random(0)
    for _ in range(300):
        shape = [chosen.randint(1, 4) for _ in range(chosen.randint(0, 4))]
        order = chosen.sample(range(len(shape)), len(shape))
        back = sorted(range(len(order)), key=order.__getitem__)
        form = torch.empty([shape[place] for place in order]).permute(back)
        values = torch.arange(form.numel()).view(form.shape)
        vector = in_memory_order(values, form)
        start, stop = sorted(chosen.choices(range(form.numel() + 1), k=2))
        found = chunks_of(form, start, stop)
        part = vector[start:stop].clone()
        seen = torch.full(form.shape, -1)
        for chunk in found:
            view = view_of(chunk, form, part, start)
            place = tuple(
                slice(first, first + size)
                for first, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            assert torch.equal(view, values[place]) and (seen[place] == -1).all()
            seen[place] = view
        assert sorted(seen[seen >= 0].tolist()) == sorted(part.tolist())
        assert len(found) <= max(2 * form.dim() - 1, 1)


def test_a_tensor_with_gaps_lies_in_the_order_of_its_dimensions():
    form = torch.empty(3, 8)[:, ::2]
    (chunk,) = chunks_of(form, 0, 12)
    assert chunk == ((0, 0), (3, 4), 0)
    assert torch.equal(view_of(chunk, form, torch.arange(12), 0), torch.arange(12).view(3, 4))


def test_a_tensor_without_elements_is_one_empty_chunk():
    for shape in ((0,), (0, 4), (3, 0, 2)):
        (chunk,) = chunks_of(torch.empty(shape), 0, 0)
        assert chunk == ((0,) * len(shape), shape, 0)
        assert view_of(chunk, torch.empty(shape), torch.empty(0), 0).shape == shape
    assert chunks_of(torch.empty(3), 2, 2) == []
