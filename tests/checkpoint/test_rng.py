"""Generators: equal numbers after a restore, different ones on each rank after reseeding."""

import io
import random

import numpy as np
import pytest
import torch

from mpidist.checkpoint import rng
from mpidist.checkpoint.plain_data import require_plain


def drawn():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
    )


def test_the_same_numbers_come_again():
    random.gauss(0, 1)  # Python and NumPy keep the second of a pair
    np.random.randn()
    saved = rng.state()
    require_plain("the state", saved)
    file = io.BytesIO()
    torch.save(saved, file)
    expected = drawn()
    assert drawn() != expected
    file.seek(0)
    rng.restore(torch.load(file, weights_only=True))
    assert drawn() == expected


def test_new_seeds_are_the_same_at_each_load_and_others_on_each_rank():
    found = []
    for rank, size in ((0, 2), (1, 2), (0, 3), (0, 2)):
        rng.reseed("digest", rank, size)
        found.append(drawn())
    assert found[0] == found[3] and len({str(row) for row in found}) == 3
    assert rng.seed_of("digest", 0, 2) != rng.seed_of("another", 0, 2)
    assert all(0 <= rng.seed_of(str(n), 0, 1) < 2**63 for n in range(50))


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["numpy"]["state"].update(pos=1_000_000),
        lambda saved: saved["numpy"]["state"].update(pos=-1),
        lambda saved: saved["numpy"]["state"].update(pos=True),
        lambda saved: saved["numpy"]["state"].update(key=[1] * 623),
        lambda saved: saved["numpy"]["state"].update(key=[1 << 32] * 624),
        lambda saved: saved["numpy"].update(bit_generator="PCG64"),
        lambda saved: saved["numpy"].update(gauss="x"),
        lambda saved: saved["numpy"].update(gauss=10**400),
        lambda saved: saved.update(python=(3, (), None)),
        lambda saved: saved.update(python=(3, [-1] * 625, None)),
        lambda saved: saved.update(python=(3, [1 << 32] * 625, None)),
        lambda saved: saved.update(python=(3, ["1"] * 625, None)),
        lambda saved: saved.update(python=(3, [1] * 624 + [625], None)),
        lambda saved: saved.update(python=(2, [1] * 625, None)),
        lambda saved: saved.update(torch=torch.zeros(3)),
        lambda saved: saved.update(torch=torch.zeros(3, dtype=torch.uint8)),
        lambda saved: saved.pop("cuda"),
    ],
)
def test_a_forged_state_is_refused(change):
    before = rng.state()
    saved = rng.state()
    change(saved)
    with pytest.raises((ValueError, RuntimeError)):
        rng.restore(saved)
    rng.restore(before)
