"""Rules about CUDA devices: assignment to ranks, torch, driver and CuPy versions, MPI; pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mpidist.cli.facts import Facts
from mpidist.cli.finding import (
    NOTE,
    PROBLEM,
    WARNING,
    Finding,
    by_node,
    several_on_a_node,
    values,
)
from mpidist.comm.discovery.child_job import NOT_TRIED
from mpidist.comm.mpi import rank_ranges


def _shared_devices(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for members in by_node(ranks).values():
        held = [facts for facts in members if facts.device is not None]
        seen = {uuid for facts in held if facts.device is not None for uuid in facts.device.visible}
        for uuid, where in values(
            held, lambda facts: facts.device.uuid if facts.device is not None else ""
        ).items():
            if len(where) < 2:
                continue
            if len(seen) < len(held):
                text = (
                    f"{members[0].host} has too few devices, {len(seen)} for {len(held)} ranks: "
                    f"{rank_ranges.named(where)} share {uuid}"
                )
                remedy = (
                    "one rank a device: fewer ranks on a node, or more devices for the job "
                    "(--gpus-per-node)"
                )
            else:
                text = (
                    f"{rank_ranges.named(where)} of {members[0].host} use one device "
                    f"({uuid}), though there are {len(seen)}"
                )
                remedy = (
                    "torch.cuda.set_device(mpidist.comm.device()), and no "
                    "CUDA_VISIBLE_DEVICES that is the same for all ranks"
                )
            yield Finding(
                WARNING,
                where,
                text,
                f"{remedy}; ranks that do share one want Nvidia's multi-process service (MPS)",
            )


def _unseen_devices(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for members in several_on_a_node(ranks):
        held = [facts.device for facts in members if facts.device is not None]
        used = {device.uuid for device in held}
        if any(used - set(device.visible) for device in held):
            where = tuple(facts.rank for facts in members)
            yield Finding(
                WARNING, where, f"ranks of {members[0].host} do not see each other's devices: "
                                "device memory goes over the host",
                "srun --gpus-per-node=N --gpu-bind=none, not --gpus-per-task; no "
                "CUDA_VISIBLE_DEVICES of one device a rank",
            )  # fmt: skip


def _torch_and_driver(ranks: Sequence[Facts]) -> Iterator[Finding]:
    def case(facts: Facts) -> tuple[str, int, bool, bool]:
        return (
            facts.versions.get("torch's CUDA", ""),
            facts.driver_cuda,
            facts.has_nvidia_driver,
            facts.device is not None,
        )

    for (cuda, driver, has_driver, has_device), where in values(ranks, case).items():
        newest = f"{driver // 1000}.{driver % 1000 // 10}"
        if not cuda and (has_driver or driver):
            yield Finding(
                WARNING, where, "the node has Nvidia's driver, but this torch is built without "
                                "CUDA: tensors stay on the CPU",
                "install a torch built for CUDA (pytorch.org has the pip line for each version)",
            )  # fmt: skip
        elif cuda and driver and _major(cuda) > driver // 1000:
            yield Finding(
                PROBLEM, where, f"torch is built for CUDA {cuda}, the driver supports up to "
                                f"{newest}: CUDA does not start",
                f"a torch built for CUDA {driver // 1000}, or a newer driver",
            )  # fmt: skip
        elif cuda and driver and not has_device:
            yield Finding(
                WARNING, where, f"torch is built for CUDA {cuda} and the driver is there, but "
                                "torch sees no device",
                "ask the batch system for devices (--gpus-per-node); look at CUDA_VISIBLE_DEVICES; "
                "containers: --nv, --gpus all",
            )  # fmt: skip


def _kernels(ranks: Sequence[Facts]) -> Iterator[Finding]:
    held = [facts for facts in ranks if facts.device is not None]
    for (cuda, cupy), where in values(
        held, lambda facts: (facts.versions["torch's CUDA"], facts.versions["cupy"])
    ).items():
        extra = f"pip install 'mpidist[cuda{_major(cuda)}]'"
        built = re.match(r"cupy-cuda(\d+)x", cupy)
        if not cupy:
            yield Finding(
                WARNING,
                where,
                "CuPy is missing: torch's operations take the place of mpidist's kernels",
                extra,
            )
        elif built and int(built[1]) != _major(cuda):
            text = f"CuPy is built for CUDA {built[1]}, torch for {cuda}"
            yield Finding(WARNING, where, text, f"pip uninstall {cupy.split()[0]}; {extra}")


def _to_mpi(ranks: Sequence[Facts]) -> Iterator[Finding]:
    held = {
        facts.rank: facts.mpi
        for facts in ranks
        if facts.device is not None and facts.mpi is not None
    }
    late = tuple(
        rank for rank, mpi in held.items() if mpi.cuda_before_mpi is False and mpi.size > 1
    )
    if late:
        yield Finding(
            WARNING, late, "there was no CUDA context when MPI started: Open MPI leaves part of "
                           "its support for devices off",
            "let mpidist start MPI (mpidist.comm.init() before 'from mpi4py import MPI'), under a "
            "launcher that sets each rank's local rank",
        )  # fmt: skip
    # All operations of a rank alike: the job of the trial could not be started.
    reasons = {rank: next(iter(mpi.operations.values()), "") for rank, mpi in held.items()}
    if failed := tuple(rank for rank, text in reasons.items() if text.startswith(NOT_TRIED)):
        yield Finding(
            WARNING, failed, "this MPI's operations on device memory could not be tried, and are "
                             f"staged: {reasons[failed[0]].removeprefix(NOT_TRIED)}",
            "where the library takes device pointers (Cray MPICH with "
            "MPICH_GPU_SUPPORT_ENABLED=1), set MPIDIST_CUDA_AWARE=1",
        )  # fmt: skip
    unknown = tuple(rank for rank, mpi in held.items() if "unknown" in mpi.operations.values())
    if unknown:
        yield Finding(
            NOTE, unknown, "this MPI's operations on device memory have not been tried: staged",
            "mpidist doctor without a launcher, on a GPU node (some seconds to minutes)",
        )  # fmt: skip


def _major(version: str) -> int:
    return int(version.split(".")[0]) if version[:1].isdigit() else 0


RULES = (_shared_devices, _unseen_devices, _torch_and_driver, _kernels, _to_mpi)
