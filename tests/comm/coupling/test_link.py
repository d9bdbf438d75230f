"""Messages between two programs."""

import gc
import weakref

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpidist.comm.coupling.coupling import FIRST_TAG
from mpidist.comm.coupling.messages import LEAVES, Tag
from mpidist.errors import CommTimeout, MpidistError
from tests.comm.coupling.programs import two
from tests.tools.support import agree

more_ranks = pytest.mark.mpi(min_size=2)


@more_ranks
def test_a_program_with_mpi_alone(group, job):
    """What a program in C or Fortran does: docs/several-programs.md."""
    if job.rank == 0:
        found = np.empty((job.size, 2), np.intc)
        job.Allgather(np.array([0, 0], np.intc), found)
        own = job.Split(0, job.rank)
        leader = int(np.flatnonzero(found[:, 0] == 1)[0])
        link = own.Create_intercomm(0, job, leader, FIRST_TAG + 1)
        left, field, step = set(), np.arange(8.0), 0
        space, status = np.zeros(1, np.int64), MPI.Status()
        while step < 5 * (job.size - 1):
            link.Recv(space, MPI.ANY_SOURCE, Tag.ASK, status)
            for _ in range(space[0]):
                head = np.array([0, step, 1, 1, 1, 8], np.int64)  # one tensor, float64, (8,)
                link.Send(head, status.source, Tag.HEAD)
                link.Send(field + step, status.source, Tag.DATA)
                step += 1
        for reader in range(job.size - 1):
            link.Send(np.array([1], np.int64), reader, Tag.HEAD)
        while len(left) < job.size - 1:
            link.Recv(space, MPI.ANY_SOURCE, Tag.ASK, status)
            if space[0] == -1:
                left.add(status.source)
        link.Free()
    else:
        with two(job) as coupled:
            count = 0
            for sample in coupled.inlet("make", depth=1):
                assert torch.equal(sample.tensors[0], torch.arange(8.0).double() + sample.label)
                count += 1
            assert count > 0
            coupled._links["make"].Free()


@more_ranks
def test_both_directions_at_once(group, job):
    other = {"make": "take", "take": "make"}
    with two(job) as coupled:
        name = coupled.program
        outlet, inlet = coupled.outlet(other[name]), coupled.inlet(other[name])
        assert coupled.inlet(other[name]) is inlet and coupled.outlet(other[name]) is outlet
        if name == "make":
            for step in range(9):
                outlet.put(torch.full((1000,), float(step)))
                assert inlet.get().tensors[0].eq(2 * step).all()
            outlet.close()
        else:
            for sample in inlet:
                outlet.put(sample.tensors[0] * 2)


@more_ranks
@pytest.mark.parametrize("found", [0, 3, 9])
def test_data_of_another_size_than_announced_is_an_error_of_get(group, job, found):
    with two(job) as coupled:
        if coupled.program == "make":
            link, space = coupled._links["take"], np.zeros(1, np.int64)
            for reader in range(job.size - 1):
                link.Send(np.array([0, 1, 2, 0, 1, 2, 1, 1, 8], np.int64), reader, Tag.HEAD)
                link.Send(np.ones(2, np.float32), reader, Tag.DATA)
                # Eight doubles are announced.
                link.Send(np.ones(found), reader, Tag.DATA)
                for _ in range(2):  # the request, and the leave
                    link.Recv(space, reader, Tag.ASK)
        else:
            inlet = coupled.inlet("make", depth=1)
            text = f'of process 0 of "make" other data than .* {8 * found} bytes, not 64'
            for _ in range(2):
                with pytest.raises(MpidistError, match=text):
                    inlet.get()
    agree(group, True)


@more_ranks
def test_memory_that_was_not_received_in_time_is_kept(group, job):
    """The reader takes the header, and the data much later."""
    with two(job) as coupled:
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            # All have asked.
            outlet._link.until(
                lambda: outlet._take_requests() or len(outlet._asked) == job.size - 1, "put", ""
            )
            outlet._link._timeout_s = 0.05
            for _ in range(job.size - 1):
                field = np.full(1 << 20, 3, np.float32)
                held = weakref.ref(field)
                with pytest.raises(CommTimeout, match="the data was not received"):
                    outlet.put(field)
                del field
                gc.collect()
                assert held() is not None
            job.Barrier()
            outlet._link._timeout_s = 20
        else:
            link, field = coupled._links["make"], np.zeros(1 << 20, np.float32)
            link.Send(np.ones(1, np.int64), 0, Tag.ASK)
            link.Recv(np.zeros(6, np.int64), 0, Tag.HEAD)
            job.Barrier()
            link.Recv(field, 0, Tag.DATA)
            assert (field == 3).all()
            link.Recv(np.zeros(1, np.int64), 0, Tag.HEAD)  # the end
            link.Send(np.array([LEAVES], np.int64), 0, Tag.ASK)
    agree(group, True)
