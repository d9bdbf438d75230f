"""Backend names: lists, order, and advice on names that probably mean mpidist; pure."""

import pytest

from mpidist.c10d.names import joined, mistaken, ours_first, pairs

KNOWN = ["undefined", "gloo", "nccl", "xccl", "ucc", "mpi", "fake", "mpidist"]


def test_a_list_is_split_and_written_again():
    for named in ("gloo", "cpu:gloo", "cpu:gloo,cuda:nccl"):
        assert joined(pairs(named)) == named
    assert pairs("cpu:gloo,cuda:nccl") == [("cpu", "gloo"), ("cuda", "nccl")]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("cuda:nccl,cpu:mpidist", "cpu:mpidist,cuda:nccl"),
        ("cpu:mpidist,cuda:nccl", "cpu:mpidist,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("mpidist", "mpidist"),
    ],
)
def test_mpidist_is_listed_first(named, expected):
    assert ours_first(named) == expected


def test_a_name_that_probably_means_mpidist_has_advice():
    for named in ("mpidst", "mpi_dist", "openmpi", "mpich", "cpu:mpi4py,cuda:nccl", "mpi"):
        problem = mistaken(named, KNOWN, has_mpi=False)
        assert problem is not None and 'backend="mpidist"' in problem
        assert ("MPIDIST_REPLACE=mpi" in problem) == (named == "mpi")


def test_a_list_that_torch_cannot_split_has_advice():
    for named in ("mpidist,gloo", "mpidist:cpu", "cpu:mpidist,nccl"):
        assert 'write "cpu:mpidist,cuda:nccl"' in mistaken(named, KNOWN, has_mpi=True)
    assert mistaken("cpu:mpidist", KNOWN, has_mpi=True) is None


def test_every_other_name_is_left_to_torch():
    for named in (*KNOWN, "cpu:gloo,cuda:nccl", "hccl", "smddp", "ncclx"):
        assert mistaken(named, KNOWN, has_mpi=True) is None
