"""Tests of a suite in ranks: what each prints of a failure."""

import pytest

from tests.peers import spawned


class Kind:
    """Test class, of whose tests torch's process closes its end of the pipe."""

    @staticmethod
    def _run(rank, method, file_name, pipe):
        if method == "test_fails":
            pipe.send(f"traceback of rank {rank}")
            pipe.close()
            raise SystemExit(10)
        pipe.close()


def test_a_test_that_passes_ends_well(capsys):
    spawned.run_test(0, Kind, "test_passes", "file")
    assert capsys.readouterr().out == ""


def test_the_traceback_of_a_failure_is_printed(capsys):
    with pytest.raises(SystemExit):
        spawned.run_test(1, Kind, "test_fails", "file")
    assert capsys.readouterr().out == "traceback of rank 1\n"
