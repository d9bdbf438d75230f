"""Sends under way: a thread that sends many messages tests them itself."""

from __future__ import annotations

from mpidist.comm.transport import sends


class Request:
    """A request that is complete unless its number is among the last."""

    def __init__(self, number, tests):
        self.number, self.tests = number, tests

    def Test(self):
        self.tests.append(self.number)
        return self.number < 900


def test_a_thread_that_sends_tests_its_sends_where_no_other_thread_polls():
    tests: list[int] = []
    some, longest = sends.Sends(None, 1, 2), 0
    for number in range(1000):
        some.pending.append((Request(number, tests), b""))
        if len(some.pending) >= some.test_at:
            some.reclaim()
        longest = max(longest, len(some.pending))
    assert longest <= 2 * sends.MAX_PENDING and len(tests) < 1100
    assert [request.number for request, _ in some.pending] == list(range(900, 1000))


def test_one_thread_at_a_time_tests_the_sends():
    some = sends.Sends(None, 1, 2)
    tests: list[int] = []
    some.pending.append((Request(0, tests), b""))
    with some._testing:
        some.test()
    assert tests == []
    some.test()
    assert tests == [0] and not some.pending
