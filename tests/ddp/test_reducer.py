"""The reducer without its module: averages in the order of the plan."""

import gc

import pytest
import torch

from mpidist.ddp.buckets import bucket
from mpidist.ddp.buckets.settings import Settings
from mpidist.ddp.reducer import Reducer
from mpidist.future import completed
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi

NAMES = ["a", "b", "c", "d"]
DENSE = [False] * len(NAMES)
ONE_EACH = Settings(limits=(40,))  # bytes: one bucket per parameter


def parameters(numel=10):
    return [
        torch.full((numel,), float(place + 1), requires_grad=True) for place in range(len(NAMES))
    ]


def loss_of(own, rank, places=(0, 1, 2, 3)):
    """Return a loss; the gradient of the parameter at a place is (place + 1) * (rank + 1)."""
    return sum(own[place].sum() * float((place + 1) * (rank + 1)) for place in places)


def backward(reducer, own, rank, places=(0, 1, 2, 3)):
    loss = loss_of(own, rank, places)
    reducer.arm([loss])
    loss.backward()


def is_mean(own, size, factor=1.0):
    """Return whether each gradient is the mean over ranks."""
    mean = (size + 1) / 2
    wanted = [torch.full_like(p, (place + 1) * mean * factor) for place, p in enumerate(own)]
    return all(torch.allclose(p.grad, value) for p, value in zip(own, wanted, strict=True))


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_are_averaged_pass_by_pass(group, as_views):
    own = parameters()
    reducer = Reducer(
        own, NAMES, DENSE, group, Settings(limits=(40,), gradient_as_bucket_view=as_views)
    )
    for turn in range(3):
        for parameter in own:
            parameter.grad = None
        backward(reducer, own, group.rank)
        agree(group, is_mean(own, group.size), f"pass {turn}: {[p.grad[0].item() for p in own]}")
    # Gradients that are not cleared are averages, the same on all ranks, to which a pass adds.
    backward(reducer, own, group.rank)
    agree(group, is_mean(own, group.size, 2.0), f"{[p.grad[0].item() for p in own]}")


def test_each_gradient_is_copied_once_into_its_bucket_and_once_back(group, monkeypatch):
    own, copied = parameters(), []
    reducer = Reducer(
        own, NAMES, DENSE, group, Settings(limits=(40,), gradient_as_bucket_view=False)
    )
    monkeypatch.setattr(
        bucket, "plain", lambda gradient: (copied.append(gradient.numel()), gradient)[1]
    )
    backward(reducer, own, group.rank)
    agree(group, len(copied) == 2 * len(own) and is_mean(own, group.size), str(copied))


def test_buckets_go_in_reverse_first_and_then_as_rank_0s_gradients_arrive(group):
    own = parameters()
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)
    assert reducer.layout.plan == [(3,), (2,), (1,), (0,)]
    # In a chain the gradient of the first used parameter is ready last. Rank 0 alone uses the
    # parameters in reverse.
    order = (3, 1, 0, 2) if group.rank == 0 else (0, 1, 2, 3)
    total = torch.zeros(10)
    for place in order:
        total = torch.tanh(total + own[place])
    reducer.arm([total])
    total.sum().backward()
    agree(group, reducer.layout.plan == [(2,), (0,), (1,), (3,)], str(reducer.layout.plan))


def test_a_hook_gets_each_bucket_once_in_the_order_of_the_plan(group):
    own, launched = parameters(), []
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)

    def hook(state, bucket):
        launched.append((state, bucket.index(), bucket.is_last()))
        return completed(bucket.buffer() * 0 + 7)

    reducer.register_hook(hook, "state")
    backward(reducer, own, group.rank)
    agree(group, launched == [("state", index, index == 3) for index in range(4)], str(launched))
    agree(group, all(bool((p.grad == 7).all()) for p in own), "what a hook returns is handed back")
    reducer.register_hook(None)
    for parameter in own:
        parameter.grad = None
    backward(reducer, own, group.rank)
    agree(group, len(launched) == 4 and is_mean(own, group.size))


def test_hooks_count_the_buckets_from_0_where_some_are_skipped(group):
    own, launched = parameters(), []
    settings = Settings(limits=(40,), find_unused_parameters=True, skip_unused=True)
    reducer = Reducer(own, NAMES, DENSE, group, settings)

    def hook(state, bucket):
        launched.append((bucket.index(), bucket.is_last()))
        return completed(bucket.buffer())

    reducer.register_hook(hook)
    backward(reducer, own, group.rank, places=(0, 1))  # the first buckets are those of the last
    backward(reducer, own, group.rank, places=(0, 1))
    wanted = [(0, False), (1, False), (2, False), (3, True), (0, False), (1, True)]
    agree(group, launched == wanted, str(launched))


@pytest.mark.parametrize("is_armed", [False, True])
def test_a_pass_behind_an_interrupted_one_is_no_rest_of_it(group, is_armed):
    own, is_broken = parameters(), True
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)

    def interrupt(gradient):
        if is_broken:
            raise KeyError("interrupted")

    def output():
        middle = own[0] * 1.0
        middle.register_hook(interrupt)
        return loss_of([middle, *own[1:]], group.rank)

    first, second = output(), output()
    reducer.arm([first])
    if is_armed:
        reducer.arm([second])
    with pytest.raises(KeyError, match="interrupted"):
        first.backward()
    is_broken = False
    for parameter in own:
        parameter.grad = None
    if not is_armed:
        reducer.disarm([second])
    second.backward()
    alone = [(place + 1.0) * (group.rank + 1) for place in range(len(NAMES))]
    found = [parameter.grad[0].item() for parameter in own]
    agree(group, is_mean(own, group.size) if is_armed else found == alone, str(found))


def test_the_average_is_scaled_for_ranks_that_still_have_inputs(group):
    own = parameters()
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)
    reducer.scale = 2.0
    backward(reducer, own, group.rank)
    agree(group, is_mean(own, group.size, 2.0), f"{[p.grad[0].item() for p in own]}")


def test_a_pass_that_is_not_armed_stays_local(group):
    own = parameters()
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)
    loss_of(own, group.rank).backward()
    local = all(
        bool((p.grad == (place + 1) * (group.rank + 1)).all()) for place, p in enumerate(own)
    )
    agree(group, local and len(reducer.layout.plan) == 4, f"{[p.grad[0].item() for p in own]}")


def test_a_missing_gradient_is_named_or_reduced_as_zero(group):
    own = parameters()
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)
    text = raises_on_all(group, RuntimeError, lambda: backward(reducer, own, group.rank, (0, 1, 3)))
    agree(group, "received no gradient" in text and ": c" in text, text)
    own = parameters()
    settings = Settings(limits=(40,), find_unused_parameters=True)
    reducer = Reducer(own, NAMES, DENSE, group, settings)
    backward(reducer, own, group.rank, (0, 1, 3) if group.rank == 0 else (0, 1))
    agree(group, own[2].grad is None, "used by nobody")
    agree(
        group, bool((own[3].grad == 4 / group.size).all()), f"used by rank 0 alone: {own[3].grad}"
    )


def test_a_plan_is_saved_by_names_and_loaded(group):
    own = parameters()
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)
    backward(reducer, own, group.rank)
    saved = reducer.layout.saved_plan()
    assert (
        sorted(name for bucket in saved["buckets"] for name in bucket) == NAMES
        and saved["is_rebuilt"]
    )
    again = parameters()
    other = Reducer(again, NAMES, DENSE, group, Settings(limits=(1 << 20,)))
    assert other.layout.plan == [(3, 2, 1, 0)]
    other.layout.load_plan(saved)
    assert other.layout.plan == reducer.layout.plan and other.layout.saved_plan() == saved
    backward(other, again, group.rank)
    agree(group, is_mean(again, group.size))


def test_a_plan_of_another_module_is_refused(group):
    own = parameters()
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)
    saved = {"buckets": [["a", "b"], ["c"]], "is_rebuilt": True, "arrivals": None}
    with pytest.raises(ValueError, match="d"):
        reducer.layout.load_plan(saved)
    mixed = [*own[:3], torch.ones(3, dtype=torch.float64, requires_grad=True)]
    reducer = Reducer(mixed, NAMES, DENSE, group, ONE_EACH)
    with pytest.raises(ValueError, match="bucket 0 holds parameters of several dtypes"):
        reducer.layout.load_plan({"buckets": [NAMES], "is_rebuilt": True, "arrivals": None})


def test_a_reducer_that_is_gone_touches_no_gradient(group):
    own = parameters()
    reducer = Reducer(own, NAMES, DENSE, group, ONE_EACH)
    backward(reducer, own, group.rank)
    del reducer
    gc.collect()
    for parameter in own:
        parameter.grad = None
    loss_of(own, group.rank).backward()
    agree(
        group,
        all(bool((p.grad == (place + 1) * (group.rank + 1)).all()) for place, p in enumerate(own)),
    )
