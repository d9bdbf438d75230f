"""Coupled programs of one job."""

import itertools

import numpy as np
import pytest
import torch

import mpidist.comm
from mpidist.errors import DisagreementError
from tests.comm.coupling.programs import two
from tests.tools.support import agree, raises_on_all, short_job

more_ranks = pytest.mark.mpi(min_size=2)


@more_ranks
def test_every_sample_comes_once_to_a_reader_that_asked(group, job):
    makers = 1 + (job.size > 3)
    with two(job, makers) as coupled:
        assert coupled.programs == {
            "make": tuple(range(makers)),
            "take": tuple(range(makers, job.size)),
        }
        assert coupled.comm.Get_size() == len(coupled.programs[coupled.program])
        seen = []
        if coupled.program == "make":
            outlet = coupled.outlet("take")
            for step in range(12):
                field = torch.arange(6.0).view(2, 3) * (step + 1)
                extra = np.full((step,), job.rank, np.int16)
                assert outlet.put(field.T, extra, label=step)  # not contiguous; empty at first
                field.zero_()
        else:
            for sample in coupled.inlet("make"):
                field, extra = sample.tensors
                assert torch.equal(field, (torch.arange(6.0).view(2, 3) * (sample.label + 1)).T)
                assert extra.tolist() == [sample.source] * sample.label
                seen.append((sample.source, sample.label))
    everything = sorted(itertools.chain(*group.all_gather_object(seen)))
    assert everything == [(maker, step) for maker in range(makers) for step in range(12)]


@more_ranks
def test_a_job_script_numbers_the_programs(group, job, monkeypatch):
    monkeypatch.setenv("MPIDIST_APPNUM", str(int(job.rank > 0)))
    with mpidist.comm.couple(["make", "take"], comm=job, timeout_s=60) as coupled:
        assert coupled.programs == {"make": (0,), "take": tuple(range(1, job.size))}
        assert coupled.program == ("take" if job.rank else "make")
    monkeypatch.setenv("MPIDIST_APPNUM", "-1")
    wrong = "MPIDIST_APPNUM must be a program's number"
    raises_on_all(group, ValueError, lambda: mpidist.comm.couple(["a", "b"], comm=job), wrong)


@more_ranks
def test_wrong_groups_are_refused_everywhere(group, job):
    for wrong in ({"a": job.size, "b": 1}, {"a": job.size}, ["a", "a"]):
        raises_on_all(group, ValueError, lambda wrong=wrong: mpidist.comm.couple(wrong, comm=job))
    raises_on_all(group, TypeError, lambda: mpidist.comm.couple([1, 2], comm=job))
    for wrong in ("ab", {"a", "b"}, iter("ab"), None, 2):
        raises_on_all(
            group,
            TypeError,
            lambda wrong=wrong: mpidist.comm.couple(wrong, comm=job),
            "couple needs a",
        )
    good = {"a": 1, "b": job.size - 1}
    limits = (("1", TypeError), (True, TypeError), (-1, ValueError), (np.nan, ValueError))
    for limit, error in limits:
        raises_on_all(
            group,
            error,
            lambda limit=limit: mpidist.comm.couple(good, comm=job, timeout_s=limit),
            "timeout_s",
        )
    # One launcher's command line: one program.
    raises_on_all(
        group,
        ValueError,
        lambda: mpidist.comm.couple(["a", "b"], comm=job),
        "couple({'simulation': 2, 'train': 2})",
    )
    different = {"a": 1, ("b" if job.rank == 0 else "c"): job.size - 1}
    raises_on_all(
        group,
        DisagreementError,
        lambda: mpidist.comm.couple(different, comm=job),
        f"other groups in the processes {[0] if job.rank else list(range(1, job.size))} of the job",
    )
    refused = {"a": 1, "b": job.size - (job.rank > 0)}  # one too many in process 0
    caught = None
    try:
        mpidist.comm.couple(refused, comm=job)
    except (ValueError, DisagreementError) as error:
        caught = error
    expected = (
        "was refused in the processes [0]" if job.rank else f"processes for a job of {job.size}"
    )
    agree(group, expected in str(caught), f"expected {expected!r}; got {caught!r}")


_WITHOUT_CLOSE = """
import torch

from mpidist.comm.coupling.coupling import couple


def main():
    # The last reference goes with the function.
    coupled = couple({"make": 1, "take": 1, "also": 1})
    if coupled.program == "make":
        outlet = coupled.outlet("take")
        for label in range(3):
            outlet.put(torch.zeros(10), label=label)
    elif coupled.program == "take":
        print("took", *[sample.label for sample in coupled.inlet("make")])
        outlet, count = coupled.outlet("also"), 0
        while outlet.put(torch.zeros(10)):
            count += 1
        print("also took", count > 1)
    else:
        inlet = coupled.inlet("take")
        inlet.get(), inlet.get()


main()
"""


@pytest.mark.slow
def test_programs_that_end_without_close_say_so():
    done = short_job(3, _WITHOUT_CLOSE)
    assert done.returncode == 0, done.stderr
    assert "took 0 1 2" in done.stdout and "also took True" in done.stdout, done.stdout
