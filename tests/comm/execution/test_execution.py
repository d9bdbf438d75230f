"""Execution of one operation: checks, order, status, errors.

MPI is not started; the operations are functions of the tests.
"""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.fast_path import FastPath
from mpidist.comm.execution.group_settings import GroupSettings
from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.execution.op_status import IDLE
from mpidist.comm.execution.operation import Operation
from mpidist.comm.execution.progress import Progress, is_at_once
from mpidist.errors import CommTimeout, GroupError


def execution_of(size=4, is_single_node=True):
    far = SimpleNamespace(name="far")
    mpi = SimpleNamespace()
    comm = SimpleNamespace(
        rank=1,
        size=size,
        nodes=(0, 0, 0, 0),
        mpi=mpi,
        plain=mpi,
        is_single_node=is_single_node,
        kept={},
        sleeping=lambda: far,
        name="near",
    )
    progress = Progress("test")
    settings = GroupSettings("test", "key", (10, 11, 12, 13)[:size], 600)
    return Execution(GroupState(comm, settings, progress.items), progress)


@pytest.fixture
def execution():
    made = execution_of()
    yield made
    made.progress.close(10)
    made.state.is_closed = True  # or its finalizer would warn


def test_a_synchronous_operation_runs_in_the_caller_with_its_arguments(execution):
    seen, x, y = [], torch.ones(2), torch.zeros(3)

    def operation(comm, inputs, outputs, *args):
        entered = execution.state.journal.snapshot()[0]
        seen.append(
            (
                comm.name,
                inputs,
                outputs,
                args,
                threading.current_thread(),
                entered.operation,
                entered.shape,
            )
        )

    assert execution.launch(Operation("name", operation, (x,), (y,), (3, "four"))) is None
    assert seen == [("near", (x,), (y,), (3, "four"), threading.current_thread(), "name", (3,))]
    assert execution.state.journal.sequence == 1 and execution.state.journal.tensor is IDLE


def test_an_asynchronous_one_runs_in_the_groups_thread(execution):
    seen, y = [], torch.zeros(3)
    work = execution.launch(
        Operation("name", lambda *_: seen.append(threading.current_thread().name), (), (y,)),
        async_op=True,
    )
    assert work.wait(60) and seen == ["mpidist-test"]
    assert work.operation == "name" and work.result() == (y,) and not execution.state.journal.queue


def test_between_nodes_the_groups_thread_sleeps_while_it_waits():
    execution = execution_of(is_single_node=False)
    seen = []

    def operation(comm, *_):
        seen.append(comm.name)

    execution.launch(Operation("name", operation))
    execution.launch(Operation("name", operation), async_op=True).wait(60)
    execution.progress.close(10)
    execution.state.is_closed = True
    assert seen == ["near", "far"]


def test_a_synchronous_call_waits_behind_the_queue(execution):
    gate, ran = threading.Event(), []
    execution.launch(
        Operation("first", lambda *_: (gate.wait(60), ran.append("first"))), async_op=True
    )
    other = threading.Timer(0.05, gate.set)
    other.start()
    execution.launch(Operation("second", lambda *_: ran.append("second")))
    other.join()
    assert ran == ["first", "second"]


@pytest.mark.parametrize("async_op", [False, True])
def test_an_answer_of_the_algorithm_leaves_the_group_in_order(execution, async_op):
    def fail(*_):
        raise ValueError("the culprit")

    def call():
        work = execution.launch(Operation("name", fail), async_op=async_op)
        work.wait(60)

    with pytest.raises(ValueError, match="the culprit"):
        call()
    assert execution.state.journal.tensor is IDLE
    ran = []
    execution.launch(Operation("next", lambda *_: ran.append(1)))
    assert ran == [1]


def test_a_failed_group_refuses_later_and_queued_calls(execution):
    entered, gate, ran = threading.Event(), threading.Event(), []
    first = execution.launch(
        Operation("first", lambda *_: (entered.set(), gate.wait(60))), async_op=True
    )
    assert entered.wait(60)
    queued = execution.launch(Operation("queued", lambda *_: ran.append(1)), async_op=True)
    execution.state.fail(CommTimeout("the first reason"))
    execution.state.fail(CommTimeout("the second"))
    gate.set()
    assert first.wait(60)
    for call in (
        queued.wait,
        lambda: execution.launch(Operation("later", lambda *_: ran.append(2))),
    ):
        with pytest.raises(CommTimeout, match="the first reason"):
            call()
    assert ran == []


def test_a_closed_group_names_the_call_that_it_refuses(execution):
    execution.state.is_closed = True
    with pytest.raises(
        GroupError, match=r'rank 1 of 4 \(group "test"\): scatter was called on a closed group'
    ):
        execution.launch(Operation("scatter", lambda *_: None))
    assert execution.state.is_closed


@pytest.mark.parametrize("async_op", [False, True])
def test_stages_in_order_are_one_operation(execution, async_op):
    ran = []

    def stages():
        assert is_at_once()
        inner = execution.launch(Operation("inner", lambda *_: ran.append("inner")), async_op=True)
        assert inner.is_completed()
        ran.append("behind it")

    work = execution.in_order(stages, async_op, None, "in_order")
    if async_op:
        work.wait(60)
    assert (work is None) == (not async_op)
    assert ran == ["inner", "behind it"] and not is_at_once()


def test_a_group_that_is_dropped_warns_and_ends_its_thread():
    execution = execution_of()
    execution.state.close_fast_path = FastPath(execution).close
    execution.launch(Operation("name", lambda *_: None), async_op=True).wait(60)
    thread = execution.progress._thread
    with pytest.warns(ResourceWarning, match='group "test" was dropped without close'):
        del execution
    thread.join(60)
    assert not thread.is_alive()
    alone = execution_of(size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del alone
