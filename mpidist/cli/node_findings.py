"""Rules about nodes: cores of their ranks, shared memory, locked memory and RDMA; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpidist.cli.facts import SHARED_MEMORY, Facts
from mpidist.cli.finding import NOTE, WARNING, Finding, by_node, several_on_a_node, size

_SHM_OF_A_RANK = 16 << 20  # Open MPI, per rank
_SHM_OF_CONTAINERS = 64 << 20  # docker, podman
_YIELD = "OMPI_MCA_mpi_yield_when_idle"


def _shared_cores(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for members in several_on_a_node(ranks):
        shared = {core for facts in members for core in facts.bound_to}
        where = tuple(facts.rank for facts in members)
        if len(shared) == 1:
            yield Finding(
                WARNING, where, f"{len(members)} ranks of {members[0].host} are all bound to core "
                                f"{min(shared)}: they take turns",
                "mpidist run --bind-to none, mpirun --bind-to none, or srun --cpus-per-task=N with "
                "--cpu-bind=cores",
            )  # fmt: skip
        elif len(shared) < len(members):
            yield Finding(
                WARNING, where, f"{len(members)} ranks of {members[0].host} share {len(shared)} "
                                "cores: waiting ranks take turns",
                "fewer ranks on a node, or more cores for the job; figures of such a run say "
                "nothing about speed",
            )  # fmt: skip
        threads = sum(facts.torch_threads for facts in members)
        if threads > max(len(shared), len(members)) and any(
            "OMP_NUM_THREADS" not in facts.settings for facts in members
        ):
            yield Finding(
                WARNING, where,
                f"OMP_NUM_THREADS is not set: {len(members)} ranks of {members[0].host} compute "
                f"with {threads} threads on "
                f"{len(shared)} cores",
                f"OMP_NUM_THREADS={max(1, len(shared) // len(members))} for all ranks ('mpidist "
                "run' sets 1 unless you set it)",
            )  # fmt: skip


def _bound_ranks(ranks: Sequence[Facts]) -> Iterator[Finding]:
    crowded = tuple(
        facts.rank
        for facts in ranks
        if len(facts.bound_to) == 1 < min(facts.torch_threads, facts.cores)
    )
    if crowded:
        yield Finding(
            WARNING, crowded, "torch computes with several threads, and the rank is bound to one "
                              "core",
            "mpirun --bind-to none, or --map-by slot:PE=8 for 8 threads a rank; srun "
            "--cpus-per-task=8",
        )  # fmt: skip
    spinning = tuple(
        facts.rank
        for facts in ranks
        if facts.settings.get(_YIELD) in ("0", "false") and len(facts.bound_to) == 1
    )
    if spinning:
        yield Finding(
            WARNING, spinning, f"{_YIELD}=0, and the rank is bound to one core: its threads wait "
                               "milliseconds for each other",
            f"unset {_YIELD}: mpidist sets it to 1",
        )  # fmt: skip


def _memory(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for members in by_node(ranks).values():
        first, where = members[0], tuple(facts.rank for facts in members)
        if first.shm_bytes < 0:
            yield Finding(
                WARNING, where, f"{first.host} has no {SHARED_MEMORY}: MPI connects ranks of the "
                                "node by a slower way, or not",
                "mount a tmpfs there; in a container start it with --shm-size or --ipc=host",
            )  # fmt: skip
        elif first.shm_free_bytes < _SHM_OF_A_RANK * len(members) or (
            first.shm_bytes <= _SHM_OF_CONTAINERS and len(members) > 1
        ):
            yield Finding(
                WARNING, where,
                f"{SHARED_MEMORY} of {first.host} has {size(first.shm_free_bytes)} of "
                f"{size(first.shm_bytes)} left; MPI needs "
                f"about {size(_SHM_OF_A_RANK * len(members))} for {len(members)} ranks, and may "
                "end with a bus error",
                "remove what earlier jobs have left there; start a container with --shm-size=8g or "
                "--ipc=host",
            )  # fmt: skip
        if any(facts.mpi is not None and facts.mpi.shares_memory is False for facts in members):
            yield Finding(
                WARNING, where, f"ranks of {first.host} cannot map each other's memory: gradients "
                                "go through MPI instead",
                "start all ranks of a node in one container, as one user; /proc/PID/fd of the "
                "others must be readable",
            )  # fmt: skip


def _rdma(ranks: Sequence[Facts]) -> Iterator[Finding]:
    asked = [
        (facts, facts.mpi.transports)
        for facts in ranks
        if facts.mpi is not None and facts.mpi.transports.rdma_devices
    ]
    limited = tuple(facts.rank for facts, _ in asked if 0 <= facts.memlock_bytes < 1 << 30)
    if limited:
        limit = size(min(facts.memlock_bytes for facts, _ in asked if facts.rank in limited))
        yield Finding(
            WARNING, limited, f"locked memory is limited to {limit}: RDMA cannot register larger "
                              "buffers",
            "'ulimit -l unlimited' for jobs (limits.conf on the nodes; "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)",
        )  # fmt: skip
    plain = tuple(facts.rank for facts, known in asked if not known.libraries and not known.device)
    if plain:
        devices = ", ".join(asked[0][1].rdma_devices)
        yield Finding(
            WARNING, plain, f"the node has {devices}, and this MPI has loaded no library for it: "
                            "messages would go over TCP",
            "use the cluster's MPI (its module, MPI4PY_LIBMPI=/path/to/libmpi.so), which was built "
            "with UCX or libfabric",
        )  # fmt: skip
    unsafe = tuple(
        facts.rank
        for facts, _ in asked
        if not {"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"} & {name for name in facts.settings}
    )
    if unsafe:
        yield Finding(
            NOTE, unsafe, "the node has RDMA devices: a forked DataLoader worker may crash with "
                          "memory that is registered",
            "DataLoader(multiprocessing_context='forkserver'), or RDMAV_FORK_SAFE=1",
        )  # fmt: skip


CORES = (_shared_cores, _bound_ranks)
MEMORY = (_memory, _rdma)
