"""MPIDIST_TRACE: on all ranks or on none; pure."""

from mpidist.comm.mpi import tracing


def test_file_is_the_variable(monkeypatch):
    monkeypatch.delenv(tracing.ENV_TRACE, raising=False)
    assert tracing.file() == ""
    monkeypatch.setenv(tracing.ENV_TRACE, " run.json.gz ")
    assert tracing.file() == "run.json.gz"


def test_ranks_without_it_are_named():
    assert tracing.problem([0, 0]) is None and tracing.problem([1, 1]) is None
    assert tracing.problem([1, 0, 0, 0]) == (
        "MPIDIST_TRACE is not set on ranks 1-3; set it on all ranks or on none"
    )
