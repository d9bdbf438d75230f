"""Exceptions in answers, rebuilt at the caller."""

from mpidist.errors import RemoteError
from mpidist.rpc.values import remote_error
from mpidist.rpc.worker import WorkerInfo


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


class Keeps(Exception):
    def __init__(self, words, number):
        super().__init__(words, number)
        self.number = number


def test_exceptions_keep_type_arguments_and_traceback():
    worker = WorkerInfo("far", 2)
    error = remote_error.rebuild(remote_error.describe(raised(Keeps("words", 3))), worker)
    assert (
        type(error) is Keeps
        and error.number == 3
        and error.__cause__.worker == "far"
        and "in raised" in str(error.__cause__)
    )

    class Local(Exception):
        pass

    error = remote_error.rebuild(remote_error.describe(raised(Local("here"))), worker)
    assert type(error) is RemoteError and error.rank == 2 and "Local: here" in str(error)
