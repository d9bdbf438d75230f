"""Train on what a simulation makes meanwhile: rank 0 simulates in plain mpi4py, the others train.

mpirun -n 4 python examples/simulation_training.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from command_line import parse, positive
from mpi4py import MPI

BATCH, SUBSTEPS, SECONDS = 64, 100, 0.5


def oscillators(generator: np.random.Generator) -> np.ndarray:
    """Return positions and speeds of damped oscillators, before and after ``SECONDS``.

    Returns:
        float32 of shape (BATCH, 2, 2): oscillator, before and after, position and speed.
    """
    before = after = generator.standard_normal((BATCH, 2))
    for _ in range(SUBSTEPS):
        position, speed = after.T
        change = np.stack([speed, -position - 0.5 * speed], axis=1)
        after = after + change * (SECONDS / SUBSTEPS)
    return np.stack([before, after], axis=1).astype(np.float32)


def simulate(job: MPI.Comm, steps: int) -> None:
    """Send each trainer a batch for each step; the trainers' program starts no torch here."""
    generator = np.random.default_rng(0)
    for _ in range(steps):
        for trainer in range(1, job.size):
            job.Send(oscillators(generator), trainer)


def train(comm: MPI.Comm, batch: Callable[[], np.ndarray], steps: int) -> None:
    """Learn the motion, a linear map, on the ranks of a communicator; print the loss."""
    import torch

    import mpidist.comm
    from mpidist.ddp import DistributedDataParallel

    group = mpidist.comm.init(comm=comm)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for _ in range(steps):
        before, after = torch.from_numpy(batch()).unbind(1)
        loss = torch.nn.functional.mse_loss(model(before), after)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # The mean of all trainers' last batches.
    loss = loss.detach()
    group.all_reduce(loss, mpidist.comm.AVG)
    if group.rank == 0:
        print(f"{group.size} trainer(s), {steps} steps: loss {loss:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=200, help="batches of each trainer")
    job = MPI.COMM_WORLD
    steps = parse(parser, job.rank).steps
    is_simulating = job.rank == 0 and job.size > 1
    comm = job.Split(int(is_simulating), job.rank)
    if is_simulating:
        simulate(job, steps)
    elif job.size == 1:
        generator = np.random.default_rng(0)
        train(comm, lambda: oscillators(generator), steps)
    else:
        memory = np.empty((BATCH, 2, 2), np.float32)

        def received() -> np.ndarray:
            job.Recv(memory, 0)
            return memory

        train(comm, received, steps)


if __name__ == "__main__":
    main()
