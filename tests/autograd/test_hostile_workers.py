"""A worker with invalid messages: its own passes fail with the reason, and other passes go on."""

from __future__ import annotations

import pytest
import torch

import mpidist.autograd as autograd
import mpidist.rpc as rpc
from mpidist.autograd import parts
from mpidist.autograd.api import _engine
from mpidist.autograd.control_messages import Notice, send_gradients
from mpidist.rpc import current
from mpidist.rpc.message import Kind
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("clean")]


@pytest.fixture(params=[False, True], ids=["anything", "list"])
def workers(request, group):
    """Return the names of all workers; run once with a list of allowed functions, once without."""
    listed = [scaled, wrong_gradients, returns_it] if request.param else None
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=listed)
    yield [f"worker{rank}" for rank in range(group.size)]
    rpc.shutdown()


def scaled(x):
    return 3 * x


def wrong_gradients(to, context, wrong):
    """Send gradients of all messages received from a worker in a context, without a pass."""
    key = to << 48 | 1 << 20
    found = [
        receive
        for receive in _engine.contexts.require(context).receives.values()
        if receive.source == to
    ]
    for receive in found:
        send_gradients(to, not receive.is_answer, context, key, receive.message, False, wrong)
    return len(found)


def says(to, *content):
    current.require().engine_messages.send(to, Kind.AUTOGRAD_NOTICE, content, 0)


@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_invalid_notices_are_refused_and_other_passes_go_on(group, workers, to, mode):
    other = (group.rank + 1) % group.size
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, scaled, args=(x,)).sum()
        for content in [
            (),
            (99,),
            (int(Notice.DONE), 0, 0, ()),
            (int(Notice.CLEANUP), other << 48 | 1),
            (int(Notice.CLEANUP), 77 << 48 | 1),
            (int(Notice.ADOPT), 77 << 48 | 1),
            (int(Notice.PROBE), context, 77 << 48 | 1),
            (int(Notice.ASK), context, 77 << 48 | 1 << 47 | 1),
            (int(Notice.SUMMARY), context, other << 48 | 1 << 47, "text", "text"),
            (int(Notice.REPORT), context, other << 48 | 1, "text", [1], ["a"]),
            (int(Notice.AWAIT), context, group.rank << 48 | 1 << 47, True, tuple(range(10_000))),
            [1] * 10_000,
        ]:
            says(other, *content) if type(content) is tuple else says(other, content)
        autograd.backward(context, [loss], mode=mode)
        assert autograd.get_gradients(context)[x].tolist() == [3, 3, 3]
    agree(group, rpc.rpc_sync(to, scaled, args=(2,)) == 6)


@pytest.mark.parametrize(
    "wrong",
    [
        [torch.ones(7, 3)],
        [torch.ones(3, dtype=torch.complex64)],
        [torch.ones(3), torch.ones(3)],
        [],
        ["text"],
    ],
)
def test_gradients_of_another_form_end_no_other_pass(group, workers, to, wrong):
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, scaled, args=(x,)).sum()
        assert rpc.rpc_sync(to, wrong_gradients, args=(group.rank, context, wrong)) == 1
        autograd.backward(context, [loss])
        assert autograd.get_gradients(context)[x].tolist() == [3, 3, 3]
    group.barrier()


def returns_it(x):
    return x


@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_a_gradient_of_another_shape_fails_its_pass_with_the_reason(
    group, workers, to, mode, monkeypatch
):
    """Worker 1 sends each gradient in another shape."""
    if group.rank == 1:
        monkeypatch.setattr(
            parts,
            "send_gradients",
            lambda *args: send_gradients(*args[:-1], [torch.ones(4, *args[-1][0].shape)]),
        )
    group.barrier()
    text = ""
    if group.rank == 0:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync(to, returns_it, args=(x,)).sum()
            try:
                autograd.backward(context, [loss], mode=mode)
            except RuntimeError as error:
                text = str(error)
            assert not autograd.get_gradients(context)
    group.barrier()
    agree(group, group.rank != 0 or "rank 1 sent a gradient of shape (4, 3)" in text, text)
