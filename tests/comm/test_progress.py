"""Queue and thread of a group: order, executing thread, callbacks, end."""

import threading
import time
from functools import partial

import pytest

from mpidist.comm.progress import Progress, at_once, is_at_once
from mpidist.errors import GroupError
from mpidist.future import Future


@pytest.fixture
def progress():
    order = Progress("test")
    yield order
    order.close(10)


def test_queued_operations_end_in_their_order_in_one_thread(progress):
    ran = []
    futures = [Future() for _ in range(50)]

    def operation(number):
        ran.append((number, threading.current_thread().name))
        return (number,)

    for number, one in enumerate(futures):
        progress.submit(one, partial(operation, number))
    assert [one.wait(10) for one in futures] == [(number,) for number in range(50)]
    assert ran == [(number, "mpidist-test") for number in range(50)] and progress.pending == 0


def test_a_synchronous_call_enters_only_if_the_queue_is_empty(progress):
    assert progress.try_enter()
    progress.lock.release()
    ran, gate, first, behind = [], threading.Event(), Future(), Future()
    progress.submit(first, lambda: ran.append(("first", gate.wait(10))))
    assert not progress.try_enter()
    waiting = threading.Thread(target=progress.run, args=(behind, lambda: ran.append("behind")))
    waiting.start()
    deadline = time.monotonic() + 10
    while progress.pending < 2 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert progress.pending == 2
    gate.set()
    waiting.join(10)
    assert ran == [("first", True), "behind"] and behind.done() and first.done()


def test_what_the_caller_executes_runs_in_its_thread(progress):
    threads = []
    progress.run(Future(), lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()] and progress._thread is None


@pytest.mark.parametrize("way", ["submit", "run"])
def test_an_error_is_the_operations_alone(progress, way):
    def fail():
        raise KeyError("the culprit")

    wrong, right = Future(), Future()
    getattr(progress, way)(wrong, fail)
    progress.submit(right, lambda: True)
    with pytest.raises(KeyError, match="the culprit"):
        wrong.wait(10)
    assert isinstance(wrong.exception(), KeyError) and right.wait(10) and right.exception() is None


def test_operations_of_a_callback_precede_the_queue(progress):
    ran, gate = [], threading.Event()
    first, inner, second = Future(), Future(), Future()

    def issue(future):
        progress.submit(inner, partial(ran.append, "from the callback"))
        ran.append("behind it")

    progress.submit(first, partial(gate.wait, 10))
    first.add_done_callback(issue)
    progress.submit(second, partial(ran.append, "queued before"))
    gate.set()
    second.wait(10)
    assert ran == ["from the callback", "behind it", "queued before"]


def test_at_once_ends_with_its_block_and_is_the_threads_own():
    seen = []
    with at_once():
        with at_once():
            assert is_at_once()
        assert is_at_once()
        other = threading.Thread(target=lambda: seen.append(is_at_once()))
        other.start()
        other.join()
    assert seen == [False] and not is_at_once()


def test_closing_waits_for_the_queue_and_refuses_later_operations():
    order, ran = Progress("short"), []
    works = [Future() for _ in range(5)]
    for number, one in enumerate(works):
        order.submit(one, partial(ran.append, number))
    order.close(10)
    assert ran == list(range(5)) and all(one.done() for one in works)
    assert not order._thread.is_alive()
    with pytest.raises(GroupError, match='group "short" is closed'):
        order.submit(Future(), partial(ran.append, 5))
    order.close(10)


def test_an_abandoned_thread_ends_after_the_queue():
    order, gate, ran = Progress("lost"), threading.Event(), []
    order.submit(Future(), partial(gate.wait, 10))
    order.submit(Future(), partial(ran.append, 1))
    order.abandon()
    gate.set()
    order._thread.join(10)
    assert ran == [1] and not order._thread.is_alive()


def test_the_thread_keeps_no_tensor_of_an_ended_operation(progress):
    import gc
    import weakref

    class Tensor:
        pass

    tensor = Tensor()
    alive, done = weakref.ref(tensor), Future()
    progress.submit(done, partial(lambda held: held, tensor))
    assert done.wait(10) is tensor
    del tensor, done
    for _ in range(100):
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


def test_an_operation_that_waits_for_the_lock_counts_as_queued(progress):
    """The group's thread takes it out of the queue before a synchronous call has ended."""
    assert progress.try_enter()
    first, second, gate = Future(), Future(), threading.Event()
    started = threading.Event()
    progress.submit(first, lambda: (started.set(), gate.wait(10)))
    progress.submit(second, lambda: None)
    while progress._queue.qsize() > 1:
        time.sleep(1e-3)
    assert progress.queued() == 2
    progress.lock.release()
    assert started.wait(10) and progress.queued() == 1
    gate.set()
    second.wait(10)
    progress.close(10)
    assert progress.queued() == 0
