"""Future: one writer, any number of waiters."""

import threading

import pytest

from mpidist.errors import CommTimeout
from mpidist.future import Future


def test_waiters_in_many_threads_get_the_value():
    future: Future[int] = Future()
    got = []
    threads = [threading.Thread(target=lambda: got.append(future.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    future.set_result(7)
    for thread in threads:
        thread.join()
    assert got == [7] * 8 and future.wait() == 7 and future.value() == 7


def test_a_wait_ends_at_its_timeout_and_leaves_the_future_as_it_was():
    future: Future[int] = Future()
    with pytest.raises(CommTimeout, match="no result after"):
        future.wait(0.01)
    with pytest.raises(TimeoutError):
        future.wait(0.0)
    future.set_result(1)
    assert future.wait(0.0) == 1


@pytest.mark.parametrize("limit", [float("inf"), 1e300, 8.64e13])
def test_a_wait_may_last_longer_than_a_lock_can(limit):
    future: Future[int] = Future()
    completing = threading.Timer(0.05, future.set_result, (1,))
    completing.start()
    assert future.wait(limit) == 1
    completing.join()


def test_exceptions_are_raised_by_wait_and_value():
    future: Future[int] = Future()
    future.set_exception(KeyError("k"))
    for ask in (future.wait, future.value):
        with pytest.raises(KeyError):
            ask()
    assert isinstance(future.exception(), KeyError)


def test_callbacks_run_once_whether_added_before_or_after():
    future: Future[int] = Future()
    seen = []
    future.add_done_callback(lambda f: seen.append(("before", f.value())))
    assert future.has_callbacks()
    future.set_result(3)
    future.add_done_callback(lambda f: seen.append(("after", f.value())))
    assert seen == [("before", 3), ("after", 3)]


def test_then_chains_values_and_errors():
    first: Future[int] = Future()
    doubled = first.then(lambda f: f.value() * 2)
    broken = doubled.then(lambda f: 1 // 0)
    first.set_result(21)
    assert doubled.wait() == 42
    with pytest.raises(ZeroDivisionError):
        broken.wait()


def test_completing_twice_is_an_error():
    future: Future[int] = Future()
    future.set_result(1)
    with pytest.raises(RuntimeError, match="already"):
        future.set_result(2)
    with pytest.raises(RuntimeError, match="not complete"):
        Future().value()


def test_an_exception_nobody_asked_about_is_reported(capsys):
    future: Future[int] = Future()
    future.set_exception(ValueError("lost"))
    del future
    assert "never retrieved" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("is_complete", [True, False])
def test_an_interrupt_in_a_callback_leaves_the_main_threads_call(capsys, kind, is_complete):
    """Behind all callbacks; ``then``'s future has it, too."""
    future: Future[int] = Future()
    ran: list[int] = []

    def interrupted(parent):
        raise kind("from a handler")

    if is_complete:
        future.set_result(3)
        for add in (future.add_done_callback, future.then):
            with pytest.raises(kind, match="from a handler"):
                add(interrupted)
        return
    future.add_done_callback(interrupted)
    after = future.then(interrupted)
    future.add_done_callback(lambda parent: ran.append(parent.value()))
    with pytest.raises(kind, match="from a handler"):
        future.set_result(3)
    assert future.wait() == 3 and ran == [3] and isinstance(after.exception(), kind)
    assert capsys.readouterr().err == ""


def test_a_raising_callback_is_reported_and_the_others_run(capsys):
    future: Future[int] = Future()
    future.add_done_callback(lambda f: 1 // 0)
    seen = []
    future.add_done_callback(lambda f: seen.append(f.value()))
    future.set_result(5)
    printed = capsys.readouterr().err
    assert seen == [5] and "callback" in printed and "ZeroDivisionError" in printed
