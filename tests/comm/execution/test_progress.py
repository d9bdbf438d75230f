"""Queue and thread of a group: order, executing thread, callbacks, end."""

import threading
import time
from functools import partial

import pytest

from mpidist import future as future_module
from mpidist.comm.execution import progress as progress_module
from mpidist.comm.execution.progress import Progress, at_once, is_at_once
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
    assert [one.wait(60) for one in futures] == [(number,) for number in range(50)]
    assert ran == [(number, "mpidist-test") for number in range(50)] and progress.pending == 0


def test_a_synchronous_call_enters_only_if_the_queue_is_empty(progress):
    assert progress.try_enter()
    progress.leave()
    ran, gate, first, behind = [], threading.Event(), Future(), Future()
    progress.submit(first, lambda: ran.append(("first", gate.wait(60))))
    assert not progress.try_enter()
    waiting = threading.Thread(target=progress.run, args=(behind, lambda: ran.append("behind")))
    waiting.start()
    deadline = time.monotonic() + 10
    while progress.pending < 2 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert progress.pending == 2
    gate.set()
    waiting.join(60)
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
        wrong.wait(60)
    assert isinstance(wrong.exception(), KeyError) and right.wait(60) and right.exception() is None


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
    second.wait(60)
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
    order._thread.join(60)
    assert ran == [1] and not order._thread.is_alive()


def test_the_thread_keeps_no_tensor_of_an_ended_operation(progress):
    import gc
    import weakref

    class Tensor:
        pass

    tensor = Tensor()
    alive, done = weakref.ref(tensor), Future()
    progress.submit(done, partial(lambda held: held, tensor))
    assert done.wait(60) is tensor
    del tensor, done
    for _ in range(100):
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


def test_an_operation_that_waits_for_the_lock_counts_as_queued(progress):
    """The group's thread is awake before a synchronous call has ended."""
    assert progress.try_enter()
    first, second, gate = Future(), Future(), threading.Event()
    started = threading.Event()
    progress.submit(first, lambda: (started.set(), gate.wait(60)))
    progress.submit(second, lambda: None)
    while progress._wakes.qsize() > 1:
        time.sleep(1e-3)
    assert len(progress.items) == 2
    progress.leave()
    assert started.wait(60) and len(progress.items) == 1
    gate.set()
    second.wait(60)
    progress.close(10)
    assert len(progress.items) == 0


def submit(progress, ran, name):
    """Submit an operation that notes its name and thread, as a group does; return its future."""
    future = Future()
    future.helped_by(progress.help)
    progress.submit(future, lambda: ran.append((name, threading.current_thread().name)))
    return future


@pytest.fixture
def held(progress):
    """Keep the group's thread asleep: a waiting thread holds the lock meanwhile."""
    with progress.lock:
        yield


def helped(progress, ran, count):
    """Have this thread execute operations until the group's thread looks by itself."""
    deadline = time.monotonic() + 60
    while not (progress._looks and progress._helped >= count):
        submit(progress, ran, "helped").wait()
        assert time.monotonic() < deadline, (progress._helped, progress._looks)


def test_a_waiting_thread_executes_what_it_waits_for_if_that_is_next(progress, held):
    ran = []
    futures = [submit(progress, ran, name) for name in "abc"]
    for one in futures[:2]:
        one.wait()
    here = threading.current_thread().name
    assert ran == [("a", here), ("b", here)]
    assert futures[0].done() and not futures[2].done() and progress.pending == 1


def test_a_waiting_thread_executes_no_operation_that_it_does_not_wait_for(progress):
    ran = []
    with progress.lock:
        submit(progress, ran, "ahead")
        last = submit(progress, ran, "last")
        progress.help(last)
        assert ran == []
    last.wait()
    assert ran[0] == ("ahead", "mpidist-test") and ran[1][0] == "last"


def test_a_thread_does_not_execute_what_is_queued_behind_an_ended_operation(progress, held):
    ran, ended = [], Future()
    ended.set_result(None)
    behind = submit(progress, ran, "behind")
    progress.help(ended)
    assert ran == [] and not behind.done() and progress.pending == 1


def test_what_a_waiting_thread_leaves_is_executed(progress):
    ran = []
    first, behind = submit(progress, ran, "first"), submit(progress, ran, "behind")
    first.wait()
    behind.wait(60)  # with a limit, a thread does not execute
    assert [name for name, _ in ran] == ["first", "behind"] and progress.pending == 0


def test_a_callback_runs_in_the_groups_thread_whoever_executes_the_operation(progress, held):
    ran, first = [], Future()
    first.helped_by(progress.help)

    def operation():
        ran.append(threading.current_thread().name)
        # Added by another thread while the operation is executed.
        first.add_done_callback(lambda future: issue())

    def issue():
        ran.append(threading.current_thread().name)
        submit(progress, ran, "of the callback")

    progress.submit(first, operation)
    first.wait()
    behind = submit(progress, ran, "behind")
    assert not progress.is_idle() and ran == [threading.current_thread().name]
    progress.lock.release()
    try:
        behind.wait(60)
    finally:
        progress.lock.acquire()
    assert ran[1:] == [
        "mpidist-test", ("of the callback", "mpidist-test"), ("behind", "mpidist-test")
    ]  # fmt: skip


class _Slow:
    """A lock that the threads of groups come late to acquire."""

    def __init__(self, lock):
        self._lock = lock

    def __enter__(self):
        if threading.current_thread().name.startswith("mpidist-"):
            time.sleep(0.2)
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


def test_a_callback_that_is_added_at_the_end_precedes_later_operations(progress, monkeypatch):
    """The group's thread has executed the operation, and completes it."""
    ran, executed = [], threading.Event()
    first, second = Future(), Future()
    monkeypatch.setattr(future_module, "_callbacks_lock", _Slow(future_module._callbacks_lock))

    def issue(future):
        inner = Future()
        progress.run(inner, partial(ran.append, "of the callback"))

    progress.submit(first, executed.set)
    executed.wait(60)
    time.sleep(0.05)
    first.add_done_callback(issue)
    progress.run(second, partial(ran.append, "issued afterwards"))
    first.wait(60)
    progress.submit(last := Future(), lambda: None)
    last.wait(60)
    assert ran == ["of the callback", "issued afterwards"]


def test_callbacks_that_call_each_others_groups_end():
    one, other, ran = Progress("one"), Progress("other"), []
    both = threading.Barrier(2)

    def calling(progress, name):
        def callback(future):
            both.wait(60)
            inner = Future()
            inner.helped_by(progress.attend)
            progress.run(inner, partial(ran.append, name))

        return callback

    called = []
    with one.lock, other.lock:
        for progress, peer in ((one, other), (other, one)):
            end = Future()
            progress.submit(end, lambda: None)
            called.append(end.then(calling(peer, peer._name)))
    for end in called:
        end.wait(60)
    one.close(60)
    other.close(60)
    assert sorted(ran) == ["one", "other"] and one.is_idle() and other.is_idle()


def test_a_callback_may_wait_for_what_is_queued_behind_it(progress):
    ran, first = [], Future()
    with progress.lock:
        progress.submit(first, lambda: None)
        behind = submit(progress, ran, "behind")
        last = submit(progress, ran, "last")
        first.add_done_callback(lambda future: (behind.wait(), ran.append("callback")))
    last.wait(60)
    assert ran == [("behind", "mpidist-test"), "callback", ("last", "mpidist-test")]


class _Noted:
    """A queue of wake-ups that notes what is put."""

    def __init__(self, wakes, woken):
        self.get, self._put, self._woken = wakes.get, wakes.put, woken

    def put(self, goes_on):
        self._woken.append(goes_on)
        self._put(goes_on)


def test_a_thread_that_was_helped_is_not_woken_and_still_executes(progress, monkeypatch):
    ran, woken = [], []
    monkeypatch.setattr(progress_module, "_LINGER_S", 60.0)
    helped(progress, ran, progress_module._HELPED)
    monkeypatch.setattr(progress, "_wakes", _Noted(progress._wakes, woken))
    nobody_waits = submit(progress, ran, "nobody waits")
    deadline = time.monotonic() + 60
    while not nobody_waits.done() and time.monotonic() < deadline:
        time.sleep(1e-3)
    monkeypatch.undo()
    assert not woken and ran[-1] == ("nobody waits", "mpidist-test")
    # It has executed an operation, so the next one wakes it.
    assert progress._helped == 0 and progress._wakes_thread()
    assert submit(progress, ran, "behind").wait(60) is None


def test_a_thread_that_looks_by_itself_falls_asleep(progress):
    ran = []
    helped(progress, ran, progress_module._HELPED)
    deadline = time.monotonic() + 60
    while progress._looks and time.monotonic() < deadline:
        time.sleep(1e-2)
    assert not progress._looks
    assert submit(progress, ran, "later").wait(60) is None and ran[-1][0] == "later"


def test_an_interrupt_ends_the_operation_that_a_waiting_thread_executes(progress, held):
    wrong, ran = Future(), []
    wrong.helped_by(progress.help)

    def interrupted():
        raise KeyboardInterrupt

    progress.submit(wrong, interrupted)
    right = submit(progress, ran, "right")
    with pytest.raises(KeyboardInterrupt):
        wrong.wait()
    assert isinstance(wrong.exception(), KeyboardInterrupt)
    right.wait()
    assert ran == [("right", threading.current_thread().name)] and progress.pending == 0


def test_threads_that_wait_at_once_keep_the_order(progress):
    ran, count = [], 200
    futures = [submit(progress, ran, number) for number in range(count)]
    threads = [
        threading.Thread(target=lambda own=own: [one.wait() for one in futures[own::3]])
        for own in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [number for number, _ in ran] == list(range(count)) and progress.pending == 0


def test_close_executes_what_is_queued():
    order, ran = Progress("test"), []
    helped(order, ran, progress_module._HELPED)
    last = submit(order, ran, "last")
    order.close(60)
    assert last.done() and ran[-1][0] == "last"


@pytest.fixture
def asleep(monkeypatch):
    """Return a queue whose thread sleeps, and which no operation wakes."""
    order = Progress("test")
    monkeypatch.setattr(progress_module, "_LINGER_S", 60.0)
    helped(order, [], progress_module._HELPED)
    monkeypatch.setattr(progress_module, "_LOOK_S", 60.0)
    time.sleep(0.1)
    return order


def test_close_waits_for_what_is_queued_behind_what_a_waiting_thread_executes(asleep):
    order, ran, gate, started = asleep, [], threading.Event(), threading.Event()
    first = Future()
    first.helped_by(order.help)
    order.submit(first, lambda: (started.set(), gate.wait(60)))
    works = [submit(order, ran, number) for number in range(2)]
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    started.wait(60)
    closing = threading.Thread(target=order.close, args=(60,))
    closing.start()
    time.sleep(0.05)
    gate.set()
    for thread in (closing, waiting):
        thread.join(60)
    assert all(one.done() for one in works) and [name for name, _ in ran[-2:]] == [0, 1]


def test_close_waits_for_callbacks_of_the_last_operation_that_a_waiting_thread_executes(asleep):
    order, ran, gate, started = asleep, [], threading.Event(), threading.Event()
    first = Future()
    first.helped_by(order.help)
    order.submit(first, lambda: (started.set(), gate.wait(60)))
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    started.wait(60)
    first.add_done_callback(lambda future: ran.append(threading.current_thread().name))
    closing = threading.Thread(target=order.close, args=(60,))
    closing.start()
    time.sleep(0.05)
    gate.set()
    for thread in (closing, waiting):
        thread.join(60)
    assert ran == ["mpidist-test"] and order.is_idle() and not order._thread.is_alive()


def test_an_operation_that_comes_while_another_thread_closes_is_executed_or_refused():
    for _ in range(100):
        order, gate = Progress("test"), threading.Barrier(2)
        order.submit(Future(), lambda: None)
        late, refused = Future(), []

        def closing(order=order, gate=gate):
            gate.wait(60)
            order.close(60)

        thread = threading.Thread(target=closing)
        thread.start()
        gate.wait(60)
        try:
            order.submit(late, lambda: "executed")
        except GroupError as error:
            refused.append(error)
        thread.join(60)
        assert refused or late.wait(60) == "executed"
        assert order.pending == 0 and not (refused and late.done())


def test_a_callback_that_closes_its_group_executes_the_queue_first():
    order, ran = Progress("test"), []
    first = Future()
    with order.lock:
        order.submit(first, lambda: None)
        behind = submit(order, ran, "behind")
        first.add_done_callback(lambda future: (order.close(60), ran.append("closed")))
    behind.wait(60)
    order._thread.join(60)
    assert ran == [("behind", "mpidist-test"), "closed"] and not order._thread.is_alive()


def test_a_group_may_be_closed_within_a_call_of_the_thread_that_executes():
    """As by a signal's handler: the queue's thread ends behind the call."""
    progress = Progress("test")
    first: Future[None] = Future()
    progress.submit(first, lambda: None)
    first.wait(60)
    with progress.lock:
        progress.close(0.0)
    progress._thread.join(60)
    assert not progress._thread.is_alive()
