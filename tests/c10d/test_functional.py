"""Functional collectives: the operators that compiled code calls, on a group of mpidist."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

from tests.tools.support import agree, job, printed

ops = torch.ops._c10d_functional
registered = torch._C._distributed_c10d._get_work_registry_size


@pytest.mark.mpi(min_size=1)
def test_each_operator_has_the_result_of_its_collective(world, default_group):
    """The result of each operator for inputs made from the rank."""
    name, rank, size = default_group.group_name, world.rank, world.size
    mine, every = torch.full((2,), float(rank)), torch.arange(float(size))
    total, all_rows = every.sum().item(), every.repeat_interleave(2)
    wide = torch.full((2 * size,), float(rank + 1))
    out, within = torch.empty(2 * size), torch.empty(2 * size)
    within[2 * rank : 2 * rank + 2] = mine
    part = torch.empty(2)
    cases = {
        "all_reduce": (ops.all_reduce(mine, "sum", name), [total] * 2),
        "all_reduce_": (ops.all_reduce_(mine.clone(), "max", name), [size - 1.0] * 2),
        "all_reduce_coalesced": (
            ops.all_reduce_coalesced([mine], "avg", name)[0],
            [total / size] * 2,
        ),
        "all_reduce_coalesced_": (
            ops.all_reduce_coalesced_([mine.clone()], "sum", name)[0],
            [total] * 2,
        ),
        "broadcast": (ops.broadcast(mine, size - 1, name), [size - 1.0] * 2),
        "broadcast_": (ops.broadcast_(mine.clone(), 0, name), [0.0] * 2),
        "all_gather_into_tensor": (ops.all_gather_into_tensor(mine, size, name), all_rows),
        "all_gather_into_tensor_coalesced": (
            ops.all_gather_into_tensor_coalesced([mine], size, name)[0],
            all_rows,
        ),
        "all_gather_into_tensor_out": (
            ops.all_gather_into_tensor_out(mine, size, name, out=out),
            all_rows,
        ),
        "the same in place": (
            ops.all_gather_into_tensor_out(within[2 * rank :][:2], size, name, out=within),
            all_rows,
        ),
        "reduce_scatter_tensor": (
            ops.reduce_scatter_tensor(wide, "sum", size, name),
            [total + size] * 2,
        ),
        "reduce_scatter_tensor_out": (
            ops.reduce_scatter_tensor_out(wide, "sum", size, name, out=part),
            [total + size] * 2,
        ),
        "reduce_scatter_tensor_coalesced": (
            ops.reduce_scatter_tensor_coalesced([wide], "sum", size, name)[0],
            [total + size] * 2,
        ),
        "all_to_all_single": (
            ops.all_to_all_single(wide, [2] * size, [2] * size, name),
            all_rows + 1,
        ),
    }
    to, source, got, twice = (rank + 1) % size, (rank - 1) % size, torch.empty(2), torch.empty(2)
    if size > 1 and hasattr(ops, "isend"):
        sent = ops.isend(mine, to, 0, name)
        cases["irecv"] = ops.irecv(got, source, 0, name), [float(source)] * 2
        cases["isend"] = sent, []
        if hasattr(ops, "batch_p2p_ops"):
            sent, received = ops.batch_p2p_ops(
                ["isend", "irecv"], [to, source], [1, 1], [mine, twice], name
            )
            cases["batch_p2p_ops, send"], cases["batch_p2p_ops, receive"] = (
                (sent, []),
                (received, [float(source)] * 2),
            )
    # The work of a send is also registered under the sent tensor.
    ops.wait_tensor(mine)
    for operator, (result, expected) in cases.items():
        waited = ops.wait_tensor(result)
        agree(world, torch.equal(waited, torch.as_tensor(expected)), f"{operator}: {waited}")


ANOTHER_BACKEND = """
    import json
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives

    dist.init_process_group("mpidist")
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    out = torch.empty(size)
    operator = torch.ops._c10d_functional.all_gather_into_tensor_out
    result = operator(torch.full((1,), float(rank)), size, gloo.group_name, out=out)
    out = torch.ops._c10d_functional.wait_tensor(result).tolist()
    facts = {"rank": rank, "out": out, "got": [1.0 - rank]}
    if hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
        mine, got = torch.full((1,), float(rank)), torch.empty(1)
        batch = torch.ops._c10d_functional.batch_p2p_ops
        works = batch(["isend", "irecv"], [1 - rank] * 2, [0, 0], [mine, got], gloo.group_name)
        facts["got"] = [torch.ops._c10d_functional.wait_tensor(work) for work in works][1].tolist()
    print(json.dumps(facts), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.mpi(min_size=2)
def test_wait_tensor_waits_for_works_that_were_registered_in_flight(world, default_group):
    """Every asynchronous call, for all of its output tensors; a wait drops the work's entries."""
    rank, size = world.rank, world.size
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, sums = torch.full((2000,), float(rank + 1)), torch.full((2000,), float(rank + 1))
    rows, parts = torch.zeros(size, 2000), [torch.zeros(2000) for _ in range(size)]
    received, sent = torch.zeros(2, 2000), []

    def send(tag=0):
        with allow_inflight_collective_as_graph_input_ctx(False):
            sent.append(dist.isend(mine, right, tag=tag))

    total = size * (size + 1) / 2
    calls = {
        "all_reduce": (lambda: dist.all_reduce(sums, async_op=True), [sums], total),
        "all_gather": (lambda: dist.all_gather(parts, mine, async_op=True), parts, None),
        "into_tensor": (
            lambda: dist.all_gather_into_tensor(rows.view(-1), mine, async_op=True),
            [rows],
            None,
        ),
        "irecv": (lambda: dist.irecv(received[0], left), [received], None),
    }
    with allow_inflight_collective_as_graph_input_ctx():
        for name, (call, outputs, expected) in calls.items():
            work = call()
            entries = registered()
            if name == "irecv":
                send()
            for output in outputs:
                ops.wait_tensor(output)
            done = work.is_completed() and entries == len(outputs) and registered() == 0
            if expected is not None:
                done = done and bool((outputs[0] == expected).all())
            agree(world, done, f"{name}: {entries} entries, then {registered()}")
        # Two works of one storage: the wait for one neither waits for the other nor drops it.
        first, second = (dist.irecv(row, left, tag=tag) for tag, row in enumerate(received))
        send()
        first.wait()
        agree(world, registered() == 1, f"{registered()} entries of the second receive")
        world.barrier()
        send(tag=1)
        ops.wait_tensor(received)
        agree(world, second.is_completed() and registered() == 0, "the second receive")
    for one in sent:
        one.wait()
    agree(world, bool((received == left + 1).all()), "what was received")


@pytest.mark.slow
def test_groups_of_another_backend_go_on_to_torchs_kernel():
    out = printed(job(2, ANOTHER_BACKEND))
    assert [line["out"] for line in out.values()] == [[0.0, 1.0]] * 2
    assert [out[rank]["got"] for rank in range(2)] == [[1.0], [0.0]]
