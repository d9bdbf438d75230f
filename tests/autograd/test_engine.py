"""Backward passes over ranks against one process: random graphs, message counts, late messages."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.rpc.threads import interceptor
from tests.autograd import random_graphs
from tests.autograd.remote_functions import (
    cube,
    cube_with_hook,
    look_up,
    loss_of,
    weight_gradient,
)
from tests.rpc.network import delayed
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("clean")]

MODES = ["fast", "smart"]


def check_graphs(group, seeds, **options):
    # All ranks run their own graphs at the same time.
    wrong = []
    for seed in seeds:
        for mode in MODES:
            unused = mode == "smart" and seed % 2 == 0
            wrong.append(
                random_graphs.complaint(
                    100 * seed + group.rank, group.size, mode, unused=unused, **options
                )
            )
    agree(group, not any(wrong), next(filter(None, wrong), ""))


@pytest.mark.parametrize("hooks", [False, True])
def test_random_graphs_equal_one_process(group, workers, hooks):
    check_graphs(group, range(8), hooks=hooks)


@pytest.mark.parametrize("hooks", [False, True])
def test_random_graphs_with_late_messages_equal_one_process(group, workers, hooks):
    with delayed(group.rank):
        check_graphs(group, range(2), hooks=hooks)
        group.barrier()


@pytest.mark.long
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_random_graphs_long(group, workers, hooks, late):
    if not late:
        check_graphs(group, range(8, 120), hooks=hooks)
        return
    with delayed(group.rank):
        check_graphs(group, range(8, 24), hooks=hooks)
        group.barrier()


def cube_by_way_of(other, x):
    return rpc.rpc_sync(other, cube, args=(x * 2,)) * 3


def pair(x):
    return x * 2, x * 3


def in_place(x):
    x += 1
    x.mul_(2)
    return x


def gradient_of(context, reference):
    return autograd.get_gradients(context)[reference.local_value()]


@pytest.mark.parametrize("mode", MODES)
class TestBothModes:
    def test_there_and_back_through_two_workers(self, group, workers, to, mode):
        x = torch.full((3,), 2.0, requires_grad=True)
        with autograd.context() as context:
            # A → B → A
            loss = rpc.rpc_sync(to, cube_by_way_of, args=(workers[group.rank], x)).sum()
            autograd.backward(context, [loss], mode=mode)
            assert autograd.get_gradients(context)[x].tolist() == [3 * 3 * 16.0 * 2] * 3
        assert x.grad is None
        group.barrier()

    def test_roots_that_came_from_another_worker(self, group, workers, to, mode):
        x = torch.tensor(3.0, requires_grad=True)
        with autograd.context() as context:
            first, second = rpc.rpc_sync(to, pair, args=(x,))
            third = rpc.rpc_sync(to, cube, args=(x,))
            autograd.backward(context, [first, third, second, first], mode=mode)
            assert autograd.get_gradients(context)[x].item() == 2 + 27 + 3 + 2
        group.barrier()

    def test_several_passes_add_up_until_the_graph_is_gone(self, group, workers, to, mode):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync(to, cube, args=(x,)).sum()
            for times in range(1, 4):
                autograd.backward(context, [loss], retain_graph=True, mode=mode)
                assert autograd.get_gradients(context)[x].tolist() == [3.0 * times] * 2
            autograd.backward(context, [loss], mode=mode)
            with pytest.raises(
                RuntimeError, match=r"Error on Node \d+: .*backward through the graph a second time"
            ):
                autograd.backward(context, [loss], mode=mode)
        group.barrier()

    def test_received_tensors_may_be_changed_in_place(self, group, workers, to, mode):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            came = rpc.rpc_sync(to, in_place, args=(x,))
            came *= 3
            autograd.backward(context, [came.sum()], mode=mode)
            assert autograd.get_gradients(context)[x].tolist() == [6, 6]
        group.barrier()

    def test_an_output_that_gets_no_gradient(self, group, workers, to, mode):
        """Undefined gradients are sent as flags, not as zeros."""
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            first, _ = rpc.rpc_sync(to, pair, args=(x,))
            autograd.backward(context, [first.sum()], mode=mode)
            assert autograd.get_gradients(context)[x].tolist() == [2, 2]
        group.barrier()

    def test_checkpoints_recompute_without_recording(self, group, workers, to, mode):
        x = torch.full((2,), 2.0, requires_grad=True)

        def layer(h):
            return torch.tanh(rpc.rpc_sync(to, in_checkpoint, args=(h,)) * 2)

        with autograd.context() as context:
            loss = checkpoint(layer, x, use_reentrant=False).sum()
            before = len(autograd._current_context()._send_functions())
            autograd.backward(context, [loss], mode=mode)
            assert len(autograd._current_context()._send_functions()) == before
            found = autograd.get_gradients(context)[x]
        (expected,) = torch.autograd.grad(torch.tanh(torch.sin(x).exp() * 2).sum(), [x])
        assert torch.allclose(found, expected)
        group.barrier()

    def test_sparse_gradients(self, group, workers, to, mode):
        table = torch.nn.Embedding(6, 2, sparse=True)
        with autograd.context() as context:
            rows = rpc.rpc_sync(to, torch.mul, args=(table(torch.tensor([1, 1, 4])), 2))
            reference = rpc.remote(to, torch.nn.Embedding, args=(6, 2), kwargs={"sparse": True})
            there = rpc.rpc_sync(to, look_up, args=(reference, torch.tensor([0, 5])))
            autograd.backward(context, [rows.sum(), there.sum()], mode=mode)
            found = autograd.get_gradients(context)[table.weight]
            assert found.is_sparse and found.to_dense()[:, 0].tolist() == [0, 4, 0, 0, 2, 0]
            other = rpc.rpc_sync(to, weight_gradient, args=(context, reference))
            assert other.is_sparse and other.to_dense()[:, 0].tolist() == [1, 0, 0, 0, 0, 1]
        del reference
        group.barrier()

    def test_a_pass_from_a_reference_to_the_loss(self, group, workers, to, mode):
        x = torch.full((2,), 2.0, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.remote(to, loss_of, args=(x,))
            loss.backward(context, mode=mode)
            assert autograd.get_gradients(context)[x].tolist() == [12, 12]
        del loss
        group.barrier()

    def test_hooks_that_call_other_workers(self, group, workers, to, mode):
        """Hooks run on polling threads, and their calls are not recorded."""
        x = torch.full((2,), 2.0, requires_grad=True)
        me = workers[group.rank]
        with autograd.context() as context:
            hidden = x * 1
            hidden.register_hook(lambda gradient: rpc.rpc_sync(to, torch.mul, args=(gradient, 2)))
            came = rpc.rpc_sync(to, cube_with_hook, args=(me, hidden))
            came.register_hook(lambda gradient: rpc.rpc_sync(to, torch.mul, args=(gradient, 5)))
            before = len(autograd._current_context()._send_functions())
            autograd.backward(context, [came.sum()], mode=mode)
            assert autograd.get_gradients(context)[x].tolist() == [12.0 * 2 * 3 * 5] * 2
            assert group.size == 1 or len(autograd._current_context()._send_functions()) == before
        group.barrier()

    def test_workers_that_allow_little(self, group, mode):
        rpc.shutdown()
        rpc.init_rpc(f"worker{group.rank}", group=group, allowed=[cube, loss_of, in_place])
        to = f"worker{(group.rank + 1) % group.size}"
        x = torch.full((2,), 2.0, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync(to, cube, args=(x,)).sum()
            autograd.backward(context, [loss], mode=mode)
            rpc.remote(to, loss_of, args=(x,)).backward(context, mode="smart")
            assert autograd.get_gradients(context)[x].tolist() == [24, 24]
            with pytest.raises(RuntimeError, match="Error on Node"):
                autograd.backward(context, [loss], mode="smart")
        group.barrier()

    def test_tensors_that_were_sent_in_a_call_of_remote(self, group, workers, to, mode):
        with autograd.context() as context:
            weight = rpc.remote(to, make_weight)
            loss = rpc.remote(to, times, args=(weight, 4)).to_here().sum()
            autograd.backward(context, [loss], mode=mode)
            assert rpc.rpc_sync(to, gradient_of, args=(context, weight)).tolist() == [4, 4]
        del weight
        group.barrier()


def in_checkpoint(h):
    return checkpoint(lambda one: torch.sin(one).exp(), h, use_reentrant=False)


def make_weight():
    return torch.ones(2, requires_grad=True)


def times(reference, factor):
    return reference.local_value() * factor


def test_an_unused_result_does_no_harm_in_smart_mode(group, workers, to):
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        rpc.rpc_sync(to, cube, args=(x,))
        second = rpc.rpc_sync(to, cube, args=(x * 2,))
        rpc.rpc_sync(to, cube, args=(second,))
        third = rpc.rpc_sync(to, cube, args=(y,))
        autograd.backward(context, [(third + second).sum()], mode="smart")
        found = autograd.get_gradients(context)
        assert found[y].tolist() == [3, 3] and found[x].tolist() == [24, 24]
    group.barrier()


def hop(workers, place, depth, x):
    """Call along a chain of workers."""
    following = (place + 1) % len(workers)
    return (
        rpc.rpc_sync(workers[following], hop, args=(workers, following, depth - 1, x * 2))
        if depth
        else x * 3
    )


def sent():
    return autograd._message_counts()


@pytest.mark.parametrize("depth", [1, 4, 12])
def test_messages_of_a_pass_are_counted(group, workers, depth):
    """G gradients and one DONE per worker; SMART adds at most three messages per worker."""

    def totals():
        group.barrier()
        counts = group.all_gather_object(sent())
        return {name: sum(one.get(name, 0) for one in counts) for name in set().union(*counts)}

    used = {}
    for mode in MODES:
        before = totals()
        if group.rank == 0:
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context:
                loss = hop(workers, 0, depth, x).sum()
                autograd.backward(context, [loss], mode=mode)
                assert autograd.get_gradients(context)[x].tolist() == [3.0 * 2**depth] * 2
        after = totals()
        used[mode] = {
            name: after[name] - before.get(name, 0)
            for name in after
            if after[name] > before.get(name, 0)
        }
        used[mode].pop("CLEANUP", None)
    others = min(depth, group.size - 1)
    fast = {"GRADIENTS": 2 * depth, "DONE": others} if others else {"GRADIENTS": 2 * depth}
    agree(group, used["fast"] == fast, f"{used}")
    extra = {"ASK": others, "SUMMARY": others, "AWAIT": others} if others else {}
    agree(group, used["smart"] == fast | extra, f"{used}")


def scaled(x):
    return 3 * x


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_has_not_registered_the_engine_records_all_the_same(
    group, workers, to, engine
):
    """As in a job whose servers import only mpidist.rpc."""
    if group.rank != 0:
        interceptor.register(None)
    group.barrier()
    if group.rank == 0:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync(to, scaled, args=(x,)).sum()])
            assert autograd.get_gradients(context)[x].tolist() == [3, 3, 3]
    group.barrier()
    assert group.rank > 1 or interceptor.engine is engine


def in_the_background(other, x):
    rpc.rpc_async(other, torch.mul, args=(x, 2))
    return x * 3


def test_smart_mode_while_unused_calls_are_under_way(group, workers, to):
    """ASK may reach a worker before the first request within the context."""
    other = workers[(group.rank + 2) % group.size]
    wrong = ""
    for _ in range(40):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync(to, in_the_background, args=(other, x)).sum()
            try:
                autograd.backward(context, [loss], mode="smart")
                assert autograd.get_gradients(context)[x].tolist() == [3, 3]
            except RuntimeError as error:
                wrong = str(error)
    agree(group, not wrong, wrong)
