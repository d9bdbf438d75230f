"""Rules of the doctor, each on ranks that violate only this rule; pure."""

from dataclasses import replace

import pytest

from mpidist.cli.facts import Device, Facts
from mpidist.cli.finding import NOTE, PROBLEM, WARNING
from mpidist.cli.findings import findings
from mpidist.cli.mpi_facts import MpiFacts
from mpidist.comm.discovery.transports import Transports

VERSIONS = {
    "python": "3.11.7",
    "mpidist": "0.1.0",
    "mpi4py": "4.1.2",
    "torch": "2.13.0+cu130",
    "torch's CUDA": "13.0",
    "cupy": "cupy-cuda13x 14.0",
    "numpy": "2.4",
}
MPI = MpiFacts(
    library="Open MPI v5",
    abi="openmpi",
    file="/m/libmpi.so",
    mpirun="/m/mpirun",
    standard="3.1",
    size=4,
    local_rank=0,
    local_size=2,
    nodes=(0, 0, 1, 1),
    survives_failures=False,
    cuda_aware=True,
    cuda_source="it",
    rocm_aware=False,
    rocm_source="it",
    cuda_before_mpi=True,
    operations={"Bcast": "works"},
    transports=Transports("ucx", "", {}, ("libucp",), ()),
    shares_memory=True,
)
ALL = (0, 1, 2, 3)
GPUS = ("GPU-0", "GPU-1")
FINE = Facts(
    rank=0,
    host="n0",
    launcher="srun",
    tasks=4,
    is_root=False,
    versions=VERSIONS,
    settings={"OMP_NUM_THREADS": "1"},
    in_allocation=True,
    cores=8,
    bound_to=(0, 1),
    torch_threads=1,
    shm_bytes=64 << 30,
    shm_free_bytes=60 << 30,
    memlock_bytes=-1,
    has_nvidia_driver=True,
    driver_cuda=13000,
    device=Device(0, "H100", "GPU-0", GPUS),
    path_mpirun="/m/mpirun",
    mpi=MPI,
    checks={"all_reduce": ""},
)


def job(rank=None, mpi=None, **changes):
    """Return facts of two ranks on each of two nodes without findings, with changes applied."""
    made = []
    for number in range(4):
        own = replace(
            FINE,
            rank=number,
            host=f"n{number // 2}",
            bound_to=(2 * (number % 2), 2 * (number % 2) + 1),
            device=Device(number % 2, "H100", GPUS[number % 2], GPUS),
            mpi=replace(MPI, local_rank=number % 2),
        )
        if rank is None or number == rank:
            own = replace(own, **changes)
            own = own if mpi is None else replace(own, mpi=replace(own.mpi, **mpi))
        made.append(own)
    return made


def alone(mpi=None, **changes):
    one = replace(MPI, size=1, local_size=1, nodes=(0,), shares_memory=None, **(mpi or {}))
    return [replace(FINE, launcher="python", tasks=None, in_allocation=False, mpi=one, **changes)]


def test_a_fine_job_has_no_findings():
    assert findings(job()) == [] and findings(alone()) == []


def test_clocks_are_compared_between_nodes():
    def at(*clocks_s):
        ranks = zip(job(), clocks_s, strict=True)
        return [replace(one, clock_s=clock_s) for one, clock_s in ranks]

    assert findings(at(100.0, 100.1, 100.4, 100.9)) == []
    assert findings(at(100.0, 100.0, 0.0, 0.0)) == []  # after a failure
    (found,) = findings(at(100.0, 100.0, 96.5, 96.6))
    assert (found.level, found.ranks) == (WARNING, (2, 3))
    assert "n1 -3.4 s" in found.text and "chronyd" in found.remedy
    # Ranks of one node have one clock.
    assert findings(at(100.0, 105.0, 105.0, 105.0)) == []


def test_a_node_that_computes_slower_than_the_fastest_is_named():
    def at(*times_s):
        return [
            replace(one, computing_s=time_s) for one, time_s in zip(job(), times_s, strict=True)
        ]

    assert findings(at(0.010, 0.011, 0.014, 0.014)) == []
    assert findings(at(0.010, 0.010, 0.0, 0.0)) == []  # after a failure
    # The fastest rank of a node counts: another may have shared its core for a moment.
    assert findings(at(0.010, 0.010, 0.012, 0.030)) == []
    (found,) = findings(at(0.030, 0.031, 0.010, 0.010))
    assert (found.level, found.ranks) == (WARNING, (0, 1))
    assert "n0 computes 3.0 times slower than n1" in found.text
    assert "--exclude=n0" in found.remedy


def test_a_missing_home_is_noted_for_open_mpi():
    (found,) = findings(alone(has_home=False))
    assert found.level == NOTE and "HOME is not set" in found.text
    assert findings(alone({"abi": "mpich"}, has_home=False)) == []


RDMA = Transports("ob1", "", {}, (), ("mlx5_0",))
ONE_GPU = Device(0, "H100", "GPU-0", GPUS)
# name: (the ranks, level, ranks concerned, words of the text, word of the remedy)
BROKEN = {
    "no mpi": (
        [
            replace(
                FINE,
                mpi=None,
                device=None,
                problem="no MPI library could be loaded (x); load your module",
            )
        ],
        PROBLEM,
        (0,),
        "no MPI library",
        "load your module",
    ),
    "other launcher": (
        [replace(FINE, mpi=None, device=None, problem="torchrun started 2. Start it with mpirun")],
        PROBLEM,
        (0,),
        "torchrun",
        "Start it with mpirun",
    ),
    "check": (
        job(2, checks={"all_reduce": "CommTimeout: x"}),
        PROBLEM,
        (2,),
        "all_reduce fails: CommTimeout",
        "transports",
    ),
    "torch differs": (
        job(1, versions={**VERSIONS, "torch": "2.12.0"}),
        PROBLEM,
        (0, 2, 3, 1),
        "2.12.0 on rank 1",
        "environment",
    ),
    "numpy differs": (
        job(1, versions={**VERSIONS, "numpy": ""}),
        WARNING,
        (0, 2, 3, 1),
        "missing on rank 1",
        "environment",
    ),
    "library differs": (
        job(3, {"library": "MPICH"}),
        PROBLEM,
        ALL,
        "the MPI library differs",
        "modules",
    ),
    "setting differs": (
        job(0, settings={"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp"}),
        WARNING,
        ALL,
        "UCX_TLS differs: tcp on rank 0; unset on ranks 1-3",
        "--export",
    ),
    "limits differ": (
        job(0, memlock_bytes=1 << 40),
        WARNING,
        ALL,
        "locked memory differs",
        "limits",
    ),
    "containers": (
        job(
            mpi={"nodes": (0, 1, 2, 3)},
            host="n0",
            device=None,
            has_nvidia_driver=False,
            driver_cuda=0,
        ),
        WARNING,
        ALL,
        "share no memory",
        "container",
    ),
    "no mpirun": (alone({"mpirun": ""}), WARNING, (), "no mpirun", "srun"),
    "another mpirun": (
        alone(path_mpirun="/other/mpirun"),
        WARNING,
        (),
        "the shell's mpirun is /other/mpirun",
        "mpidist run",
    ),
    "root": (alone(is_root=True), NOTE, (), "refuses to run as root", "OMPI_ALLOW_RUN_AS_ROOT=1"),
    "one of an allocation": (
        [replace(alone()[0], in_allocation=True)],
        NOTE,
        (),
        "one process",
        "mpidist run",
    ),
    "one core": (job(bound_to=(0,)), WARNING, (0, 1), "all bound to core 0", "--bind-to none"),
    "few cores": (
        [
            replace(
                FINE,
                rank=rank,
                device=None,
                versions={**VERSIONS, "torch's CUDA": "", "torch": "2.13"},
                has_nvidia_driver=False,
                driver_cuda=0,
                mpi=replace(MPI, nodes=(0, 0, 0)),
            )
            for rank in range(3)
        ],
        WARNING,
        (0, 1, 2),
        "share 2 cores",
        "fewer ranks",
    ),
    "threads": (
        job(settings={}, torch_threads=8),
        WARNING,
        (0, 1),
        "compute with 16 threads on 4 cores",
        "OMP_NUM_THREADS=2",
    ),
    "threads on a core": (
        job(1, bound_to=(7,), torch_threads=2),
        WARNING,
        (1,),
        "bound to one core",
        "--bind-to none",
    ),
    "no yield": (
        job(
            1, bound_to=(7,), settings={"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "0"}
        ),
        WARNING,
        (1,),
        "yield",
        "unset",
    ),
    "shared device": (job(device=ONE_GPU), WARNING, (0, 1), "use one device (GPU-0)", "set_device"),
    "few devices": (
        job(device=Device(0, "H100", "GPU-0", ("GPU-0",))),
        WARNING,
        (0, 1),
        "too few devices, 1 for 2 ranks",
        "MPS",
    ),
    "cpu torch": (
        job(device=None, versions={**VERSIONS, "torch's CUDA": ""}),
        WARNING,
        ALL,
        "built without CUDA",
        "pytorch.org",
    ),
    "old driver": (job(driver_cuda=12040), PROBLEM, ALL, "supports up to 12.4", "newer driver"),
    "no device": (job(device=None), WARNING, ALL, "sees no device", "--gpus-per-node"),
    "no cupy": (
        job(versions={**VERSIONS, "cupy": ""}),
        WARNING,
        ALL,
        "CuPy is missing",
        "mpidist[cuda13]",
    ),
    "other cupy": (
        job(versions={**VERSIONS, "cupy": "cupy-cuda12x 13.1"}),
        WARNING,
        ALL,
        "built for CUDA 12",
        "uninstall cupy-cuda12x",
    ),
    "mpi first": (
        job(mpi={"cuda_before_mpi": False}),
        WARNING,
        ALL,
        "no CUDA context",
        "mpidist.comm.init()",
    ),
    "not tried": (
        job(mpi={"operations": {"Bcast": "unknown"}}),
        NOTE,
        ALL,
        "have not been tried",
        "without a launcher",
    ),
    "could not be tried": (
        job(mpi={"operations": {"Bcast": "not tried: no mpirun"}}),
        WARNING,
        ALL,
        "could not be tried, and are staged: no mpirun",
        "MPIDIST_CUDA_AWARE=1",
    ),
    "no shm": (job(shm_bytes=-1), WARNING, (0, 1), "has no /dev/shm", "tmpfs"),
    "small shm": (
        job(shm_bytes=64 << 20, shm_free_bytes=64 << 20),
        WARNING,
        (0, 1),
        "64 MiB of 64 MiB left",
        "--shm-size",
    ),
    "full shm": (job(shm_free_bytes=1 << 20), WARNING, (2, 3), "1 MiB of 64 GiB left", "remove"),
    "apart": (
        job(mpi={"shares_memory": False}),
        WARNING,
        (0, 1),
        "cannot map each other's memory",
        "container",
    ),
    "memlock": (
        job(memlock_bytes=8 << 20, mpi={"transports": replace(RDMA, libraries=("libucp",))}),
        WARNING,
        ALL,
        "limited to 8 MiB",
        "ulimit -l",
    ),
    "no rdma library": (job(mpi={"transports": RDMA}), WARNING, ALL, "has mlx5_0", "module"),
    "fork": (
        job(mpi={"transports": RDMA}),
        NOTE,
        ALL,
        "forked DataLoader worker",
        "RDMAV_FORK_SAFE",
    ),
    "old torch": (
        job(versions={**VERSIONS, "torch": "2.8.1"}),
        PROBLEM,
        ALL,
        "torch is 2.8.1",
        "torch>=2.11",
    ),
    "new torch": (
        job(versions={**VERSIONS, "torch": "2.16.0"}),
        WARNING,
        ALL,
        "newer than 2.15",
        "torch==2.15",
    ),
    "wrong value": (
        job(settings={"OMP_NUM_THREADS": "1", "MPIDIST_CUDA_AWARE": "yes"}),
        PROBLEM,
        ALL,
        "MPIDIST_CUDA_AWARE=yes",
        "unset",
    ),
    "unread": (
        job(settings={"OMP_NUM_THREADS": "1", "MPIDIST_DEBGU": "1"}),
        WARNING,
        ALL,
        "MPIDIST_DEBGU",
        "MPIDIST_DEBUG",
    ),
    "debug": (
        job(settings={"OMP_NUM_THREADS": "1", "MPIDIST_DEBUG": "1"}),
        NOTE,
        ALL,
        "compare each collective",
        "",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_found_with_its_remedy(case):
    ranks, level, where, words, remedy = BROKEN[case]
    found = [finding for finding in findings(ranks) if words in finding.text]
    assert found, findings(ranks)
    assert any(
        (one.level, one.ranks) == (level, where) and remedy in one.remedy for one in found
    ), found


def test_devices_that_others_do_not_see():
    ranks = job()
    ranks[1] = replace(ranks[1], device=Device(0, "H100", "GPU-1", ("GPU-1",)))
    ranks[0] = replace(ranks[0], device=Device(0, "H100", "GPU-0", ("GPU-0",)))
    (found,) = findings(ranks)
    assert (
        found.ranks == (0, 1)
        and "do not see each other's devices" in found.text
        and "--gpu-bind=none" in found.remedy
    )


def test_the_worst_comes_first():
    ranks = job(settings={"MPIDIST_DEBUG": "1", "MPIDIST_ON_TIMEOUT": "never"}, shm_bytes=-1)
    levels = [finding.level for finding in findings(ranks)]
    assert levels == [PROBLEM, WARNING, WARNING, NOTE]
