"""Numbering of parameters over workers."""

from __future__ import annotations

import random

import pytest

from mpidist.optim.layout import Layout


def test_two_workers_and_two_groups():
    layout = Layout()
    layout.add(["a", "b", "a"], {"a": [2, 1], "b": [3]})
    layout.add(["b"], {"b": [1]})
    assert layout.numbers() == [[0, 1, 2, 3, 4, 5], [6]]
    assert (layout.groups_of("a"), layout.groups_of("b")) == ([0], [0, 1])
    assert (layout.numbers_of("a"), layout.numbers_of("b")) == ([[0, 1, 5]], [[2, 3, 4], [6]])
    assert (layout.size(0), layout.size(1)) == (6, 1)


def test_gather_and_scatter_undo_each_other():
    for seed in range(50):
        chosen = random.Random(seed)
        layout, workers = Layout(), "abc"
        for _ in range(chosen.randint(1, 4)):
            owners = [chosen.choice(workers) for _ in range(chosen.randint(1, 5))]
            layout.add(
                owners,
                {
                    owner: [chosen.randint(0, 3) for _ in range(owners.count(owner))]
                    for owner in owners
                },
            )
        total = sum(layout.size(group) for group in range(len(layout.groups)))
        state = {number: f"state of {number}" for number in range(total) if chosen.random() < 0.8}
        parts = layout.scatter(state, workers)
        assert layout.gather(parts) == state
        assert sum(map(len, parts.values())) == len(state)
        for worker in workers:
            numbers = [number for group in layout.numbers_of(worker) for number in group]
            assert numbers == sorted(numbers)
            assert parts[worker] == {
                here: state[number] for here, number in enumerate(numbers) if number in state
            }


@pytest.mark.parametrize("counts", [[2], [2, 1, 1], [2, -1], [2, 1.0], [2, True], [2, 1 << 40]])
def test_an_owners_wrong_counts_are_named(counts):
    layout = Layout()
    with pytest.raises(ValueError, match=r"^a tells \[2.*of parameters of 2 references"):
        layout.add(["a", "b", "a"], {"a": counts, "b": [3]})
    assert layout.groups == []
