"""Wrong arguments: a typed error with place, expected and given value, before any call of MPI."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpidist.comm import P2POp
from tests.tools.support import agree

pytestmark = pytest.mark.mpi

F = torch.zeros


def cases(W):
    """Return (subject, call on a group, exception, words of the message) of each case."""
    return [
        ("no tensor", lambda g: g.all_reduce([1.0]), TypeError, "tensor; got list"),
        ("sparse", lambda g: g.broadcast(F(3).to_sparse(), 0), TypeError, "dense"),
        ("meta", lambda g: g.broadcast(torch.empty(3, device="meta"), 0), ValueError, "meta"),
        (
            "leaf",
            lambda g: g.all_reduce(torch.ones(2, requires_grad=True)),
            ValueError,
            "requires grad",
        ),
        ("op", lambda g: g.all_reduce(F(2), "mean"), ValueError, "unknown reduction 'mean'"),
        ("op and dtype", lambda g: g.all_reduce(F(2), "band"), TypeError, "integers"),
        ("root", lambda g: g.broadcast(F(2), W), ValueError, rf"src in 0 \.\.\. {W - 1}; got {W}"),
        ("negative root", lambda g: g.reduce(F(2), -1), ValueError, "dst in 0"),
        ("root type", lambda g: g.broadcast(F(2), "0"), TypeError, "src to be a rank"),
        ("bool", lambda g: g.reduce(F(2), False), TypeError, "dst to be a rank"),
        ("tensor", lambda g: g.isend(F(1), torch.tensor(0)), TypeError, "dst to be a rank"),
        (
            "list length",
            lambda g: g.all_gather([F(2)] * (W + 1), F(2)),
            ValueError,
            f"hold {W} tensors, one a rank; got {W + 1}",
        ),
        ("own size", lambda g: g.all_gather([F(3)] * W, F(2)), ValueError, "of 2 elements"),
        (
            "dtypes",
            lambda g: g.all_gather([F(2).double()] * W, F(2)),
            TypeError,
            "one dtype; got torch.float32 and torch.float64",
        ),
        (
            "output",
            lambda g: g.all_gather_into_tensor(F(2 * W + 1), F(2)),
            ValueError,
            f"output of {2 * W} elements",
        ),
        (
            "output",
            lambda g: g.reduce_scatter_tensor(F(3), F(2 * W)),
            ValueError,
            "output of 2 elements",
        ),
        (
            "list entry",
            lambda g: g.reduce_scatter(F(2), [F(3)] * W),
            ValueError,
            "output of 3 elements",
        ),
        (
            "splits",
            lambda g: g.all_to_all_single(F(W), F(W), None, [W + 1] + [0] * (W - 1)),
            ValueError,
            "add up",
        ),
        (
            "negative",
            lambda g: g.all_to_all_single(F(W), F(W), None, [-1] * W),
            ValueError,
            "none negative",
        ),
        ("tag", lambda g: g.isend(F(1), 0, tag=-1), ValueError, "tag in 0"),
        ("huge tag", lambda g: g.isend(F(1), 0, tag=1 << 40), ValueError, "tag in 0"),
        ("peer", lambda g: g.isend(F(1), W), ValueError, "dst in 0"),
        ("peer", lambda g: g.recv(F(1), W), ValueError, "src in 0"),
        ("timeout", lambda g: g.barrier(async_op=True).wait("soon"), TypeError, "seconds"),
        ("timeout", lambda g: g.barrier(async_op=True).wait(-1.0), ValueError, "negative"),
    ]


def test_a_wrong_argument_raises_with_place_and_values(group):
    wrong = []
    for what, call, error, words in cases(group.size):
        try:
            call(group)
        except error as raised:
            if not re.search(words, str(raised)):
                wrong.append((what, str(raised)))
            if what not in (
                "timeout",
                "op",
                "op and dtype",
            ) and f'rank {group.rank} of {group.size} (group "' not in str(raised):
                wrong.append((what, "does not say where", str(raised)))
        else:
            wrong.append((what, "nothing raised"))
    group.barrier()
    agree(group, not wrong, str(wrong))


def test_whole_numbers_of_any_type_are_ranks(group):
    for root in range(group.size):
        value = torch.tensor([float(group.rank)])
        group.broadcast(value, np.int64(root))
        agree(group, value.item() == root, f"root {root}")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused(group):
    with FakeTensorMode():
        fake = torch.ones(3)
    wrong = []

    def refused(tensor):
        for call in (
            partial(group.broadcast, tensor, 0),
            partial(group.all_reduce, tensor),
            partial(group.all_gather, [tensor] * group.size, tensor),
            partial(group.all_reduce, tensor, async_op=True),
        ):
            for _ in range(2):  # the second time looked up among prepared calls
                try:
                    call()
                except TypeError as error:
                    if "tensor with memory of its own; got a " not in str(error):
                        wrong.append(str(error))
                else:
                    wrong.append(f"{call} took it")
        return tensor

    refused(fake)
    with pytest.raises(TypeError, match="tensor with memory of its own; got a FakeTensor"):
        group.isend(fake, group.rank)
    torch.func.vmap(refused)(torch.ones(2, 3))
    group.barrier()
    empty = torch.empty(0)
    group.broadcast(empty, 0)
    agree(group, not wrong, str(wrong))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_of_several_parts_are_refused(group):
    """On every rank, before anything is sent: nested ones, and quantized, with their scales."""
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    refused = {
        "nested tensor": [
            torch.nested.nested_tensor(rows, layout=torch.strided),
            torch.nested.nested_tensor(rows, layout=torch.jagged),
        ],
        "quantized tensor": [
            torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8),
            torch.quantize_per_channel(
                torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
            ),
        ],
    }
    wrong = []
    for words, tensors in refused.items():
        for tensor in tensors:
            for call in calls_with(group, tensor):
                for _ in range(2):  # the second time looked up among prepared calls
                    try:
                        call()
                    except TypeError as error:
                        if words not in str(error) or f"rank {group.rank} of" not in str(error):
                            wrong.append(f"{call}: {error}")
                    except Exception as error:
                        wrong.append(f"{call}: {error!r}")
                    else:
                        wrong.append(f"{call} took it")
    group.barrier()
    agree(group, not wrong, str(wrong))


def calls_with(group, tensor):
    size, rank, plain = group.size, group.rank, torch.ones(3)
    calls = [
        partial(group.all_reduce, tensor),
        partial(group.all_reduce, tensor, async_op=True),
        partial(group.all_reduce_coalesced, [tensor]),
        partial(group.reduce, tensor, 0),
        partial(group.broadcast, tensor, 0),
        partial(group.broadcast_coalesced, [tensor], 0),
        partial(group.all_gather, [plain] * size, tensor),
        partial(group.all_gather, [tensor] * size, plain),
        partial(group.all_gather_into_tensor, plain, tensor),
        partial(group.gather, tensor, [plain] * size if rank == 0 else None, 0),
        partial(group.scatter, tensor, [plain] * size if rank == 0 else None, 0),
        partial(group.reduce_scatter, plain, [tensor] * size),
        partial(group.reduce_scatter_tensor, tensor, plain),
        partial(group.all_to_all, [tensor] * size, [plain] * size),
        partial(group.all_to_all_single, plain, tensor),
        partial(group.send, tensor, rank),
        partial(group.isend, tensor, rank),
        partial(group.recv, tensor, rank),
        partial(group.irecv, tensor, rank),
        partial(group.batch_isend_irecv, [P2POp("isend", tensor, rank)]),
    ]
    return calls


def test_a_leaf_may_be_written_under_no_grad(group):
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        group.all_reduce(leaf)
    group.all_reduce(leaf.detach())
    agree(group, bool((leaf == group.size**2).all()) and leaf.requires_grad)


def test_gather_lists_belong_to_the_root(group):
    if group.rank == 0:
        with pytest.raises(TypeError, match="gather_list to be a list of tensors"):
            group.gather(F(2), None, 0)
    else:
        with pytest.raises(ValueError, match="on rank 0 alone"):
            group.gather(F(2), [F(2)] * group.size, 0)
    group.barrier()
