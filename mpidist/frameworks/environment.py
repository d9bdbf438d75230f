"""Cluster environment of Lightning for an MPI job: ranks, nodes and size from MPI."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from mpidist.comm.mpi import runtime, torchrun_env


class MPIEnvironment(ClusterEnvironment):
    """The ranks of this MPI job, for Trainer and Fabric: ``plugins=[MPIEnvironment()]``.

    Lightning's own class of this name reads MPI as well, but is detected last: where mpirun runs
    within a batch job of Slurm, Lightning uses the batch shell's ``SLURM_PROCID=0`` for every rank.
    Its detection also starts MPI before the rank's CUDA context exists, and some CUDA-aware
    libraries then refuse device memory.

    Collective: the first query starts MPI on all ranks of the job; the constructor does not.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: the launcher has started all ranks, and Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Return ``MASTER_ADDR``, or the loopback address; no group of mpidist connects to it."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Return ``MASTER_PORT``, or torch's default port; no group of mpidist connects to it."""
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        """Start MPI; return whether its launcher started several ranks."""
        return runtime.world().size > 1

    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return runtime.world().size

    def set_world_size(self, size: int) -> None:
        """Do nothing: MPI defines the size."""

    def global_rank(self) -> int:
        """Return this process's rank."""
        return runtime.world().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: MPI defines the rank."""

    def local_rank(self) -> int:
        """Return ``LOCAL_RANK`` if the user has set it, else the index among this node's ranks.

        Lightning takes the device of this index: ``LOCAL_RANK=0`` on all ranks, with ``devices=1``,
        makes them share the first one.
        """
        named = os.environ.get("LOCAL_RANK", "")
        is_ours = "LOCAL_RANK" in os.environ.get(torchrun_env.SET_BY_US, "").split(",")
        return int(named) if named.isdigit() and not is_ours else runtime.local_rank()

    def node_rank(self) -> int:
        """Return the number of this node, in the order of their first ranks."""
        world = runtime.world()
        return world.nodes[world.rank]

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare ``devices`` and ``num_nodes`` with the job.

        Raises:
            ValueError: Their product is not the number of ranks; the sampler would omit or repeat
                examples.
        """
        world = runtime.world()
        if num_devices * num_nodes == world.size:
            return
        nodes = len(set(world.nodes))
        right = f"devices={world.size // nodes}, num_nodes={nodes}"
        raise ValueError(
            f"rank {world.rank} of {world.size}: devices={num_devices} and num_nodes={num_nodes} "
            f"mean {num_devices * num_nodes} rank(s), but MPI started {world.size}; write {right}, "
            f"or start {num_devices * num_nodes} with mpirun or srun"
        )
