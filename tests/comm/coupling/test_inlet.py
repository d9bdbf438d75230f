"""Inlet of samples."""

import time

import numpy as np
import pytest
import torch

from mpidist.comm.coupling.messages import Tag
from mpidist.comm.recorder import recording
from mpidist.errors import CommTimeout, GroupError, MpidistError
from tests.comm.coupling.programs import two
from tests.tools.support import agree

more_ranks = pytest.mark.mpi(min_size=2)


@more_ranks
def test_a_reader_may_come_late_and_leave_early(group, job):
    with two(job) as coupled:
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            count = 0
            while outlet.put(torch.ones(5), label=count):
                count += 1
            assert count >= job.size - 1
            assert not outlet.put(torch.ones(5))
        else:
            time.sleep(0.05 * job.rank)
            inlet = coupled.inlet("make")
            for _ in range(job.rank):
                assert inlet.get().tensors[0].sum() == 5
            inlet.close()
            with pytest.raises(GroupError, match="closed"):
                inlet.get()


@more_ranks
def test_damaged_headers_are_an_error_of_get(group, job):
    with two(job) as coupled:
        if coupled.program == "make":
            link = coupled._links["take"]
            for reader in range(job.size - 1):
                link.Send(np.array([0, 1, 1, 77, 1, 3], np.int64), reader, Tag.HEAD)
                for _ in range(2):  # the request, and the leave
                    link.Recv(np.zeros(1, np.int64), reader, Tag.ASK)
        else:
            inlet = coupled.inlet("make")
            for _ in range(2):
                with pytest.raises(MpidistError, match='of process 0 of "make" a header that'):
                    inlet.get()
    agree(group, True)


@more_ranks
def test_waits_end_in_time(own_recorder, group, job):
    with two(job) as coupled:
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            outlet._link._timeout_s = 0.05
            with pytest.raises(CommTimeout, match=r'put with "take": no reader asked .* 0.05 s'):
                outlet.put(torch.zeros(1))
            outlet._link._timeout_s = 20
        job.Barrier()
        if coupled.program == "take":
            inlet = coupled.inlet("make")
            with pytest.raises(CommTimeout, match=r'get from "make": no sample within 0.05 s'):
                inlet.get(timeout_s=0.05)
        waits = [e for e in recording.read(own_recorder.path).entries if e.kind == "wait"]
        call = 'put with "take"' if coupled.program == "make" else 'get with "make"'
        assert any(entry.operation == call and entry.failed for entry in waits)
        job.Barrier()
