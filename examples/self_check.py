"""Check a job of a cluster: one world, a GPU per rank, correct sums, equal weights after training.

srun -n 4 python examples/self_check.py --gpus-per-node 4
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

import torch
from command_line import parse
from torch import nn

import mpidist.comm
from mpidist.ddp import DistributedDataParallel

STEPS = 20


def wrong_world(size: int) -> list[str]:
    """Compare MPI's world with the tasks of Slurm."""
    expected = (
        os.environ.get("OMPI_COMM_WORLD_SIZE")
        or os.environ.get("SLURM_STEP_NUM_TASKS")
        or str(size)
    )
    # In a heterogeneous job each component has its own number of tasks.
    if "SLURM_HET_SIZE" in os.environ or int(expected) == size:
        return []
    return [
        f"MPI connects {size} ranks, and {expected} were started: edit MPIDIST_MPI, it does not "
        "fit the MPI library"
    ]


def wrong_gpus(wanted: int, local_size: int) -> list[str]:
    """Compare the GPUs that torch sees with the site's value and with the ranks of this node."""
    seen = torch.cuda.device_count()
    if wanted == 0:
        return []
    host = socket.gethostname()
    if seen == 0:
        build = (
            "torch is a build for CPUs"
            if torch.version.cuda is None
            else f"torch has CUDA {torch.version.cuda}: see nvidia-smi"
        )
        return [f"torch sees no GPU on {host}, MPIDIST_GPUS_PER_NODE is {wanted}; {build}"]
    if seen < local_size:
        return [
            f"{host} has {local_size} ranks and {seen} visible GPUs: ask for as many GPUs as "
            "ranks, without --gpu-bind"
        ]
    return []


def wrong_sums(group: mpidist.comm.ProcessGroup, device: torch.device) -> list[str]:
    """All-reduce tensors with known sums: a few bytes and some MB, in full and half precision."""
    problems = []
    expected = sum(range(1, group.size + 1))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (3, 300_001):
            # bfloat16 represents sums of up to 22 ranks exactly; larger sums are compared with
            # tolerance.
            tensor = torch.full((numel,), group.rank + 1, dtype=dtype, device=device)
            group.all_reduce(tensor)
            if not torch.allclose(
                tensor.double(), torch.full_like(tensor, expected).double(), rtol=1e-2
            ):
                problems.append(f"the sum of {numel} {dtype} is {tensor[0].item()}, not {expected}")
    return problems


def wrong_training(group: mpidist.comm.ProcessGroup, device: torch.device) -> list[str]:
    """Train a linear model: the loss must fall, and the weights be bitwise equal on all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1).to(device), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(group.rank)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 8, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).cpu()
    problems = (
        []
        if losses[-1] < 0.5 * losses[0]
        else [f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}"]
    )
    if any(not torch.equal(weights, other) for other in group.all_gather_object(weights)):
        problems.append("ranks have trained to different weights")
    return problems


def wrong_folder(group: mpidist.comm.ProcessGroup, folder: Path) -> list[str]:
    """Write a file in the checkpoint folder on rank 0, and read it on all ranks."""
    file, problem = folder / f"self-check-{os.environ.get('SLURM_JOB_ID', 'alone')}", None
    if group.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text("written by rank 0")
        except OSError as error:
            problem = f"rank 0 cannot write into {folder} ({error}): edit MPIDIST_CHECKPOINTS"
    group.barrier()
    if problem is None and not file.is_file():
        problem = (
            f"{socket.gethostname()} does not see what rank 0 wrote into {folder}: "
            "MPIDIST_CHECKPOINTS is not shared by all nodes"
        )
    group.barrier()
    if group.rank == 0:
        file.unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return [problem] if problem else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: no rank needs one")
    parser.add_argument(
        "--folder",
        type=Path,
        default=os.environ.get("MPIDIST_CHECKPOINT", "."),
        help="where checkpoints go",
    )
    group, world = mpidist.comm.init(), mpidist.comm.world()
    options = parse(parser, group.rank)
    device = mpidist.comm.device()
    problems = [
        *wrong_world(group.size),
        *wrong_gpus(options.gpus_per_node, world.local_size),
        *wrong_sums(group, device),
        *wrong_training(group, device),
        *wrong_folder(group, options.folder),
    ]
    place = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    reports = group.all_gather_object((place, world.local_rank, str(device), problems))
    if group.rank == 0:
        for rank, (place, local_rank, device_name, found) in enumerate(reports):
            print(
                f"rank {rank}: {place}, local rank {local_rank}, {device_name}: "
                f"{'; '.join(found) or 'fine'}"
            )
        bad = sum(bool(found) for *_, found in reports)
        verdict = "ranks, all fine" if not bad else "ranks have problems"
        count = f"{bad} of {group.size}" if bad else group.size
        print(f"self-check: {count} {verdict}", flush=True)
    return 1 if any(found for *_, found in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
