"""Two programs in one job: a simulation of heat in numpy feeds a net that learns its operator.

mpirun -n 1 python examples/coupled_heat.py simulate : -n 2 python examples/coupled_heat.py train
mpirun -n 3 python examples/coupled_heat.py --simulating 1    (one command line for both)

The simulation computes how heat spreads in a rod; the trainers learn the map from the temperatures
at one time to those at a later one, each from samples of its own. The trainers ask for samples, so
the simulation runs as far ahead of them as they have room for, and ends when they have learned.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from command_line import parse, positive

import mpidist.comm
from mpidist.comm.coupling.coupling import Coupling

POINTS, BATCH, SUBSTEPS, DIFFUSION = 32, 64, 20, 0.25
PROGRAMS = ("simulate", "train")


def spread(rods: np.ndarray) -> np.ndarray:
    """Return temperatures of rods of shape (n, POINTS) after SUBSTEPS explicit steps.

    The ends are kept at 0.
    """
    for _ in range(SUBSTEPS):
        inside = np.pad(rods, ((0, 0), (1, 1)))
        rods = rods + DIFFUSION * (inside[:, 2:] - 2 * rods + inside[:, :-2])
    return rods


def simulate(coupled: Coupling) -> None:
    """Send samples until every trainer has left."""
    generator = np.random.default_rng(coupled.comm.Get_rank())
    outlet, sent, goes_on = coupled.outlet("train"), 0, True
    while goes_on:
        rods = generator.standard_normal((BATCH, POINTS))
        goes_on = outlet.put(rods.astype(np.float32), spread(rods).astype(np.float32), label=sent)
        sent += goes_on
    print(f"simulation {coupled.comm.Get_rank()}: {sent} samples sent")


def train(coupled: Coupling, steps: int) -> None:
    """Learn the operator on this program's ranks; print the loss."""
    import torch

    from mpidist.ddp import DistributedDataParallel

    # The trainers alone are the world: ranks, groups and DDP.
    group = mpidist.comm.init(comm=coupled.comm)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(POINTS, POINTS, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    samples = coupled.inlet("simulate")
    for _ in range(steps):
        sample = samples.get()
        if sample is None:
            raise RuntimeError("the simulation has ended")
        before, after = sample.tensors
        loss = torch.nn.functional.mse_loss(model(before), after)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # The mean of all trainers' last batches.
    loss = loss.detach()
    group.all_reduce(loss, mpidist.comm.AVG)
    if group.rank == 0:
        print(f"{group.size} trainer(s), {steps} steps: loss {loss:.2e}")


def problem(options: argparse.Namespace, size: int) -> str | None:
    """Return what is wrong with the number of simulating processes among ``size``, or None."""
    if options.program is not None:
        return "--simulating is for one command line" if options.simulating else None
    told = f"--simulating {options.simulating or 1} leaves no trainer among {size} process(es)"
    return None if (options.simulating or 1) < size else told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", nargs="?", choices=PROGRAMS, help="of two command lines")
    parser.add_argument("--simulating", type=positive, help="processes, of one line; 1 if left out")
    parser.add_argument("--steps", type=positive, default=200, help="batches of each trainer")
    from mpi4py import MPI

    job = MPI.COMM_WORLD
    # Of two command lines one may be wrong: its processes say so themselves.
    is_one_line = set(PROGRAMS).isdisjoint(sys.argv)
    options = parse(
        parser, job.rank if is_one_line else 0, lambda options: problem(options, job.size)
    )
    if is_one_line:
        simulating = options.simulating or 1
        counts = {"simulate": simulating, "train": job.size - simulating}
    coupled = mpidist.comm.couple(counts if is_one_line else PROGRAMS)
    if coupled.program == "simulate":
        simulate(coupled)
    else:
        train(coupled, options.steps)
    coupled.close()


if __name__ == "__main__":
    main()
