"""Rank-local state dicts: same world size and layout, no communication, through a file."""

import copy

import pytest
import torch

from mpidist.errors import DisagreementError
from mpidist.zero.state import rank_local
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import (
    ADAM,
    SGD,
    parameters_of,
    same,
    same_run,
    sharded,
    take_parameters,
    train,
)

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_training_goes_on_where_each_rank_saved_its_own(group, partition, tmp_path):
    for kind in (ADAM, SGD):
        source = sharded(group, kind, partition)
        train(source, range(2), skipped=(4,))
        torch.save(source.rank_local_state_dict(), tmp_path / "own.pt")
        saved = torch.load(tmp_path / "own.pt", weights_only=True)
        own, kept = source.rank_local_state_dict(copies=False), source.rank_local_state_dict()
        before = copy.deepcopy(saved)
        ok = [one.data_ptr() for one in own["flats"]] == [
            one.data_ptr() for one in source._local.flat.kinds.values()
        ]
        target = sharded(group, kind, partition)
        take_parameters(target, source)
        train(target, range(7, 8))
        take_parameters(target, source)
        target.load_state_dict(saved)
        ok = same_run(target, source, range(2, 4)) and same(saved, before) and ok
        ok = ok and same(kept["flats"], before["flats"])
        one, other = target.state_dict(all_ranks=True), source.state_dict(all_ranks=True)
        agree(group, ok and same(one, other), kind[0].__name__)


def test_another_layout_is_refused_by_all_ranks(group):
    own = sharded(group, ADAM, "flat")
    train(own, range(1))
    before = own.state_dict(all_ranks=True)
    other, saved = sharded(group, ADAM, "flat", frozen=True), own.rank_local_state_dict()
    train(other, range(1))
    raises_on_all(
        group,
        ValueError,
        lambda: own.load_state_dict(other.rank_local_state_dict()),
        "another layout",
    )
    for change, words in (
        ({"world_size": group.size + 1}, "this is rank"),
        ({"rank": group.rank + 1}, "this is rank"),
        ({"flats": [flat[1:] for flat in saved["flats"]]}, "damaged"),
        ({"layout": {**saved["layout"], "shapes": []}}, "another model"),
        ({"layout": {**saved["layout"], "masters": True}}, "master copies"),
        ({"layout": {**saved["layout"], "strides": []}}, "strides"),
    ):
        raises_on_all(
            group, ValueError, lambda change=change: own.load_state_dict({**saved, **change}), words
        )
    if group.size > 1:
        error = ValueError if group.rank else DisagreementError
        wrong = {**saved, "world_size": 99} if group.rank else saved
        raises_on_all(group, error, lambda: own.load_state_dict(wrong))
    after = own.state_dict(all_ranks=True)
    agree(
        group,
        same(after, before)
        and rank_local.is_rank_local(saved)
        and not rank_local.is_rank_local(after),
    )


def of_an_earlier_version(state):
    """Return a state whose tensors outside flat ones are in a list of their own."""
    loose, entries = [], {}
    for number, rows in state["entries"].items():
        entries[number] = found = []
        for name, where, value in rows:
            if isinstance(value, torch.Tensor) and value.dim():
                loose.append(value)
                where, value = rank_local.LOOSE, len(loose) - 1
            found.append((name, where, value))
    return {**state, "entries": entries, "loose": loose}


def test_state_that_is_not_flat_comes_back(group):
    """Moments of Adafactor, which have other shapes than their parameters."""
    kind = (torch.optim.Adafactor, {"lr": 0.1})
    source = sharded(group, kind)
    train(source, range(2))
    saved = source.rank_local_state_dict()
    earlier = of_an_earlier_version(saved)
    ok = saved["loose"] == [] and any(group.all_gather_object(len(earlier["loose"])))
    targets = [sharded(group, kind) for _ in range(2)]
    for target, state in zip(targets, (saved, earlier), strict=True):
        take_parameters(target, source)
        target.load_state_dict(state)
    train(source, range(2, 4))
    for target in targets:
        train(target, range(2, 4))
        ok = ok and same(target.rank_local_state_dict(), source.rank_local_state_dict())
        ok = ok and all(map(torch.equal, parameters_of(target), parameters_of(source)))
    agree(group, ok, "other state or parameters")


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_master_copies_come_back_to_the_bit(group, wire):
    source = sharded(group, ADAM, "greedy", wire=wire)
    train(source, range(2))
    saved = source.rank_local_state_dict()
    target = sharded(group, ADAM, "greedy", wire=wire)
    take_parameters(target, source)  # rounded values
    target.load_state_dict(saved)
    ok = len(saved["masters"]) == (group.size > 1)
    agree(group, same_run(target, source, range(2, 4)) and ok, "the masters are lost")
    if group.size > 1:
        plain = sharded(group, ADAM, "greedy")
        raises_on_all(group, ValueError, lambda: plain.load_state_dict(saved), "master copies")
