"""Every collective in inference mode, on inference tensors, and on parameters under no_grad."""

import pytest
import torch

from mpidist.comm import AVG, MAX, SUM
from tests.tools.support import agree, finished

NARROW_AND_WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def collectives(group, dtype):
    """Return cases: (name, function that makes tensors, call, expected values)."""
    size, rank = group.size, group.rank
    total = size * (size + 1) / 2

    def own(*shape):
        return torch.full(shape, rank + 1.0).to(dtype)

    def zeros(*shape):
        return torch.zeros(*shape).to(dtype)

    every = [float(r + 1) for r in range(size)]
    return (
        (
            "all_reduce",
            lambda: (own(6),),
            lambda t, a: group.all_reduce(t, SUM, async_op=a),
            [total] * 6,
        ),
        (
            "strided",
            lambda: (own(4, 3).t(),),
            lambda t, a: group.all_reduce(t, SUM, async_op=a),
            [total] * 12,
        ),
        (
            "mean",
            lambda: (own(70_000),),
            lambda t, a: group.all_reduce(t, AVG, async_op=a),
            [total / size] * 70_000,
        ),
        (
            "max",
            lambda: (own(6),),
            lambda t, a: group.all_reduce(t, MAX, async_op=a),
            [float(size)] * 6,
        ),
        (
            "coalesced",
            lambda: (own(3), own(5)),
            lambda s, t, a: group.all_reduce_coalesced([s, t], SUM, async_op=a),
            [total] * 3,
        ),
        (
            "reduce_scatter",
            lambda: (zeros(2), own(2 * size)),
            lambda t, i, a: group.reduce_scatter_tensor(t, i, SUM, async_op=a),
            [total] * 2,
        ),
        (
            "all_gather",
            lambda: (zeros(size), own(1)),
            lambda t, i, a: group.all_gather(list(t.split(1)), i, async_op=a),
            every,
        ),
        (
            "broadcast",
            lambda: (own(3, 2).t(),),
            lambda t, a: group.broadcast(t, 0, async_op=a),
            [1.0] * 6,
        ),
    )


def outcome(make, call, expected, asynchronous, made_in, called_in, waited_in):
    with made_in():
        tensors = make()
    with called_in():
        work = call(*tensors, asynchronous)
    with waited_in():
        finished(work)
    return tensors[0].flatten().double().tolist() == expected


def grad_mode():
    return torch.inference_mode(False)


def inference_mode():
    return torch.inference_mode()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", NARROW_AND_WIDE, ids=str)
def test_inference_mode_leaves_no_trace(group, dtype):
    """In inference mode first, which allocates scratch memory; then outside."""
    modes = (inference_mode, grad_mode)
    wrong = []
    for asynchronous in (False, True):
        for made_in in modes:
            for called_in in modes:
                for waited_in in modes:
                    for name, make, call, expected in collectives(group, dtype):
                        if name == "mean" and dtype is torch.int64:
                            continue
                        try:
                            ok = outcome(
                                make, call, expected, asynchronous, made_in, called_in, waited_in
                            )
                        except RuntimeError as error:
                            ok = False
                            name += f": {error}"
                        if not ok:
                            wrong.append(
                                (
                                    name,
                                    asynchronous,
                                    made_in.__name__,
                                    called_in.__name__,
                                    waited_in.__name__,
                                )
                            )
    agree(group, not wrong, str(wrong[:3]))


@pytest.mark.mpi
def test_no_grad_of_the_caller_holds_in_the_groups_thread(group):
    """Grad mode belongs to a thread: no_grad of the caller holds in the group's thread."""
    parameter = torch.nn.Parameter(torch.full((5,), group.rank + 1.0, dtype=torch.bfloat16))
    with torch.no_grad():
        group.all_reduce(parameter, async_op=True).wait()
    source = torch.full((2 * group.size,), 1.0, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(2, dtype=torch.bfloat16)
    group.reduce_scatter_tensor(target, source)
    group.reduce_scatter_tensor(target, source)  # reuses the memory of the first
    ok = parameter.tolist() == [group.size * (group.size + 1) / 2] * 5 and parameter.is_leaf
    agree(group, ok and target.tolist() == [group.size] * 2 and not target.requires_grad)


@pytest.mark.mpi(min_size=2)
def test_messages_of_inference_tensors_are_waited_for_in_any_mode(group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    with torch.inference_mode():
        into = torch.zeros(4, 3).t()
        work = group.irecv(into, left)
        out = torch.full((4, 6), float(group.rank)).t()[::2]
    group.send(out, right)
    work.wait()
    agree(group, bool((into == left).all()))


@pytest.mark.mpi(min_size=2)
def test_shared_memory_made_in_inference_mode_is_usable_outside(group):
    from mpidist.comm.algorithms.shared_memory import share

    if not group.is_single_node:
        pytest.skip("ranks on several nodes share no memory")
    with torch.inference_mode():
        memory = share(group, 64)
        agree(group, memory is not None, "no memory was shared")
        shared = memory.tensor(0, 4, torch.bfloat16)
        shared.own.fill_(group.rank + 1.0)
        shared.average()
    shared.own.fill_(group.rank + 1.0)
    shared.average()
    agree(
        group,
        not shared.own.is_inference() and bool((shared.own == (group.size + 1) / 2).all()),
        f"{shared.own}",
    )
