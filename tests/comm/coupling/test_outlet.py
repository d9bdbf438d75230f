"""Outlet of samples."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mpidist.comm.coupling.messages import DTYPES
from mpidist.errors import CommTimeout, GroupError
from tests.comm.coupling.programs import two
from tests.tools.support import agree

more_ranks = pytest.mark.mpi(min_size=2)


@more_ranks
def test_all_dtypes_and_sizes(group, job):
    torch.manual_seed(0)
    sent = [torch.randn(7).mul(50).to(dtype) for dtype in DTYPES]
    sent += [torch.randn(1 << 20), torch.tensor(3.5), torch.zeros(0, 4)]
    sent.append(torch.view_as_complex(torch.randn(3, 2)).conj())
    sent.append(torch.randn(3, requires_grad=True))
    with two(job) as coupled:
        if coupled.program == "make":
            for _ in range(job.size - 1):
                coupled.outlet("take").put(*sent)
        else:
            found = coupled.inlet("make", depth=1).get().tensors
            assert all(
                a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
                for a, b in zip(found, sent, strict=True)
            )
            assert not found[-1].requires_grad


@more_ranks
def test_a_sender_waits_for_its_readers(group, job):
    with two(job) as coupled:
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            is_first = job.rank == 0
            while outlet.put(torch.zeros(3), wait=False):
                raise AssertionError("nobody has asked")
            job.Barrier()
            # Each reader has room for two.
            sent = 0
            limit = time.monotonic() + 20
            while sent < 2 * (job.size - 1) and time.monotonic() < limit:
                sent += outlet.put(torch.zeros(3), wait=False)
            job.Barrier()
            assert is_first and sent == 2 * (job.size - 1)
            assert not outlet.put(torch.zeros(3), wait=False)
        else:
            job.Barrier()
            inlet = coupled.inlet("make", depth=2)
            job.Barrier()
            assert inlet.get().tensors[0].shape == (3,)


@more_ranks
def test_what_cannot_be_sent_is_refused(group, job):
    with two(job) as coupled:
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            masked = np.ma.array([1.0], mask=[True])
            for wrong in ([1.0], "text", torch.eye(2).to_sparse(), np.array(["a"]), masked, None):
                with pytest.raises(TypeError):
                    outlet.put(wrong)
            with pytest.raises(TypeError, match="of 33 dimensions"):
                outlet.put(torch.zeros([1] * 33))
            with pytest.raises(ValueError, match="needs a tensor"):
                outlet.put()
            for label, error in ((2.5, TypeError), ("1", TypeError), (1 << 63, ValueError)):
                with pytest.raises(error):
                    outlet.put(torch.zeros(1), label=label)
            # None of them has taken the place of a sample that a reader has asked for.
            for _ in range(job.size - 1):
                assert outlet.put(torch.zeros(1), label=-1 << 63)
            outlet.close()
            with pytest.raises(GroupError, match="closed"):
                outlet.put(torch.zeros(1))
        else:
            for depth, error in ((0, ValueError), (1 << 63, ValueError), (1.5, TypeError)):
                with pytest.raises(error):
                    coupled.inlet("make", depth)
            inlet = coupled.inlet("make", 1)
            assert inlet.get().label == -1 << 63
            with ThreadPoolExecutor(2) as threads:
                ends = [threads.submit(inlet.get) for _ in range(2)]
                assert [end.result() for end in ends] == [None, None]
            assert inlet.get() is None
        with pytest.raises(ValueError, match="no other program is named 'sim'"):
            coupled.outlet("sim")


@more_ranks
def test_a_close_in_vain_says_whether_its_readers_ever_came(group, job):
    with two(job) as coupled:
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            named = "rank 0 opened no inlet" if job.size == 2 else "ranks 0.* opened no inlet"
            with pytest.raises(CommTimeout, match=f'close with "take": {named} within 0.05 s'):
                outlet.close(0.05)
        job.Barrier()
        if coupled.program == "take":
            assert coupled.inlet("make").get() is None
        else:
            # A close that was left goes on.
            outlet.close()
            assert not outlet._silent and outlet._problem() == "a reader did not leave"
    agree(group, True)


@more_ranks
def test_arrays_that_numpy_calls_contiguous_and_torch_does_not(group, job):
    fields = np.zeros(1, [("field", np.float64), ("mask", np.uint8)])["field"]
    given = [np.arange(4.0)[None][::-1], np.arange(4.0)[::-1], np.ones((3, 0))[::-1], fields]
    with two(job) as coupled:
        if coupled.program == "make":
            for _ in range(job.size - 1):
                coupled.outlet("take").put(*given)
        else:
            found = coupled.inlet("make", depth=1).get().tensors
            assert all(map(np.array_equal, found, given))
    agree(group, True)


@more_ranks
def test_a_reader_may_ask_for_any_number(group, job):
    """As a program that never refuses a sample does."""
    with two(job) as coupled:
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            for step in range(4 * (job.size - 1)):
                assert outlet.put(torch.ones(2), label=step)
        else:
            labels = [sample.label for sample in coupled.inlet("make", depth=(1 << 63) - 1)]
            assert labels == sorted(labels)
