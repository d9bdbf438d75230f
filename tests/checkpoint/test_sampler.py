"""Resumable sampler against torch's, and against a brute-force twin, sample by sample."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mpidist.checkpoint import ResumableSampler
from mpidist.checkpoint.sampler import share


@pytest.mark.parametrize("length", [1, 2, 7, 12, 30])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("shuffle", "drop_last"), [(True, False), (True, True), (False, False), (False, True)]
)
def test_a_whole_epoch_is_torchs(length, replicas, shuffle, drop_last):
    if drop_last and length < replicas:
        return  # torch's length is wrong here
    for rank in range(replicas):
        settings = {
            "num_replicas": replicas,
            "rank": rank,
            "shuffle": shuffle,
            "seed": 5,
            "drop_last": drop_last,
        }
        own, torchs = (
            ResumableSampler(length, **settings),
            DistributedSampler(range(length), **settings),
        )
        for epoch in (0, 3):
            own.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(own) == list(torchs) and len(own) == len(torchs)


def twin(order, consumed, replicas, drop_last):
    """Assign the rest of an order one by one; repeat its beginning, or drop the last round."""
    hands = [[] for _ in range(replicas)]
    rest = list(order)[consumed:]
    while rest:
        if len(rest) < replicas and drop_last:
            break
        for hand in hands:
            if rest:
                hand.append(rest.pop(0))
            else:
                used = sum(map(len, hands)) - len(order[consumed:])
                hand.append(order[used % len(order)])
    return hands


def test_a_share_is_what_dealing_one_by_one_gives():
    draw = random.Random(1)
    for _ in range(400):
        length, replicas = draw.randint(1, 25), draw.randint(1, 9)
        order = draw.sample(range(length), length)
        consumed, drop_last = draw.randint(0, length + 3), draw.random() < 0.5
        shares = [share(order, consumed, rank, replicas, drop_last) for rank in range(replicas)]
        assert shares == twin(order, consumed, replicas, drop_last), (
            order,
            consumed,
            replicas,
            drop_last,
        )


def test_an_epoch_that_changes_its_ranks_loses_and_doubles_no_sample():
    draw = random.Random(2)
    for trial in range(150):
        length = draw.randint(1, 60)
        order = list(ResumableSampler(length, 1, 0, seed=trial))
        seen, state = [], None
        while state is None or state["consumed"] < length:
            size, batch = draw.randint(1, 6), draw.randint(1, 4)
            ranks = [ResumableSampler(length, size, rank, seed=trial) for rank in range(size)]
            for sampler in ranks:
                if state is not None:
                    sampler.load_state_dict(state)
            for _ in range(draw.randint(1, 4)):  # steps until the next change
                each = min(batch, len(ranks[0]))
                rows = list(zip(*(list(sampler)[:each] for sampler in ranks), strict=True))
                seen += [sample for row in rows for sample in row]
                for sampler in ranks:
                    sampler.advance(each)
            shares = [sampler.state_dict() for sampler in ranks]
            assert all(one == shares[0] for one in shares)
            state = shares[0]
        assert seen[:length] == order  # the rest fills the last round
        assert len(seen) - length < 6


def test_the_position_is_the_training_loops_and_not_the_loaders():
    samples = TensorDataset(torch.arange(23))

    def start(state=None):
        sampler = ResumableSampler(samples, 2, 1, seed=4)
        if state is not None:
            sampler.load_state_dict(state)
        return sampler, DataLoader(
            samples,
            3,
            sampler=sampler,
            num_workers=1,
            generator=torch.Generator(),
            prefetch_factor=2,
        )

    sampler, loader = start()
    sampler.set_epoch(1)
    batches = []
    for (batch,) in loader:
        batches.append(batch.tolist())
        sampler.advance(len(batch))
        if len(batches) == 2:
            state = sampler.state_dict()  # the worker has fetched more by now
    assert len(sampler) == 0 and [len(batch) for batch in batches] == [3, 3, 3, 3]
    resumed, loader = start(state)
    resumed.set_epoch(1)  # continues the epoch
    drawn = torch.get_rng_state()
    assert [batch.tolist() for (batch,) in loader] == batches[2:] and len(loader) == 2
    assert torch.equal(drawn, torch.get_rng_state())
    resumed.set_epoch(2)
    assert (resumed.epoch, resumed.consumed, len(resumed)) == (2, 0, 12)


def test_what_is_refused():
    sampler = ResumableSampler(10, 2, 0)
    with pytest.raises(ValueError, match="6 samples of rank 0, of which 5 are left"):
        sampler.advance(6)
    for change, words in (
        ({"length": 11}, "another data set"),
        ({"seed": 1}, "another seed"),
        ({"shuffle": False}, "another order"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(ValueError, match="none of ResumableSampler"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="rank from 0 to 1 of 2; got 2"):
        ResumableSampler(10, 2, 2)
    with pytest.raises(ValueError, match="at least one sample"):
        ResumableSampler([], 2, 0)


@pytest.mark.mpi
def test_ranks_of_a_group_share_an_epoch(group):
    sampler = ResumableSampler(10 * group.size, group=group)
    shares = group.all_gather_object(list(sampler))
    assert sorted(sample for held in shares for sample in held) == list(range(10 * group.size))
