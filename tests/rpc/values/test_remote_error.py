"""Exceptions in answers, rebuilt at the caller."""

from mpidist.errors import CommTimeout, MpidistError, RankFailureError, RemoteError
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


def test_errors_of_broken_calls_name_the_chain():
    workers = [WorkerInfo(f"w{rank}", rank) for rank in range(4)]
    for kind, end in ((RankFailureError, "dead"), (CommTimeout, "timed out")):
        error = kind("f on w3: w3 has died")
        error.calls = ("w2", f"w3, {end}")
        assert str(error) == "f on w3: w3 has died"  # the caller and the callee are in the text
        for rank in (1, 0):
            sent = remote_error.describe(raised(error))
            error = remote_error.rebuild(sent, workers[rank + 1])
            error = remote_error.called_by(workers[rank], error, workers[rank + 1])
        assert type(error) is kind and error.calls == ("w0", "w1", "w2", f"w3, {end}")
        assert str(error) == f"f on w3: w3 has died (calls: w0 -> w1 -> w2 -> w3, {end})"
        for _ in range(99):
            error = remote_error.called_by(workers[0], error, workers[0])
        assert len(error.calls) == 32 and error.calls[16] == "..."
        assert str(error).endswith(f"w0 -> w1 -> w2 -> w3, {end})")


def test_chains_that_other_workers_did_not_make_are_dropped():
    one, other = WorkerInfo("w0", 0), WorkerInfo("w1", 1)
    for calls in (("w2", "w3, dead"), ("w1", 3), "w1", 7, ()):
        error = MpidistError("words")
        error.calls = calls
        assert str(remote_error.called_by(one, error, other)) == "words"
    assert remote_error.called_by(one, MpidistError("words"), other).calls == ()
    assert type(remote_error.called_by(one, ValueError("words"), other)) is ValueError


def test_a_kept_error_has_its_traceback_as_text():
    error = raised(Keeps("words", 3))
    kept = remote_error.without_frames(error, WorkerInfo("w0", 0))
    assert type(kept) is Keeps and kept.number == 3 and kept.__traceback__ is None
    assert isinstance(kept.__cause__, remote_error.RemoteTraceback)
    # Another worker's readers get the text of the first raise, once.
    assert remote_error.describe(kept)[2] == remote_error.describe(error)[2]
