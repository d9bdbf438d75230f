"""Facts about MPI on one rank: library, ranks, CUDA, transports."""

from __future__ import annotations

from dataclasses import dataclass

from mpidist.comm.discovery.transports import Transports


@dataclass(frozen=True)
class MpiFacts:
    """Facts that need MPI.

    Attributes:
        library: First line of the library's version text.
        abi: ``openmpi`` or ``mpich``.
        file: Path of ``libmpi``.
        mpirun: Path of the library's launcher; "" if none was found.
        standard: Version of the MPI standard.
        size: Number of ranks of the job.
        local_rank: Index on the node.
        local_size: Number of ranks on this node.
        nodes: Node number of each rank.
        survives_failures: ULFM is available and enabled.
        cuda_aware: The library takes CUDA's device pointers; None if unknown.
        cuda_source: Source of this information.
        rocm_aware: The library takes ROCm's device pointers; None if unknown.
        rocm_source: Source of this information.
        cuda_before_mpi: A CUDA context existed when MPI started; None if irrelevant.
        operations: Result of each operation on device memory, by name.
        transports: Known transports.
        shares_memory: The ranks of this node map each other's memory; None for a single rank, or
            if not tried.
    """

    library: str
    abi: str
    file: str
    mpirun: str
    standard: str
    size: int
    local_rank: int
    local_size: int
    nodes: tuple[int, ...]
    survives_failures: bool
    cuda_aware: bool | None
    cuda_source: str
    rocm_aware: bool | None
    rocm_source: str
    cuda_before_mpi: bool | None
    operations: dict[str, str]
    transports: Transports
    shares_memory: bool | None = None
