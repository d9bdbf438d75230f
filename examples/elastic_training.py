"""Train on while ranks die: a spare takes the place of a dead rank, with the same numbers.

mpidist run --ft -n 3 --spares 1 examples/elastic_training.py --kill 1
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from command_line import parse, positive

import mpidist.comm
from mpidist import elastic
from mpidist.checkpoint import commit, load
from mpidist.ddp import DistributedDataParallel
from mpidist.optim import OSS

COMMIT_EVERY = 5


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one step, the same for each process that is this rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.rand(32, 8, generator=generator)
    return x, (x * torch.arange(8.0)).sum(1, keepdim=True).sin()


def train(folder: Path, steps: int, victim: int | None) -> float:
    """Train from the newest commit on; return the last loss.

    Args:
        folder: Of checkpoints; identifies the run.
        steps: Number of steps in all.
        victim: Rank that dies in the middle, the first time.
    """
    world = mpidist.comm.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = OSS(net.parameters(), torch.optim.Adam, lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    resumed = load(folder, **state)
    start = 0 if resumed is None else resumed.step
    if world.rank == 0:
        print(f"step {start} on {world.size} ranks", flush=True)
    loss = torch.zeros(())
    for step in range(start, steps):
        x, y = batch(step, world.rank)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        # The first process of the rank: a spare begins at a commit.
        if step == steps // 2 and world.rank == victim and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if (step + 1) % COMMIT_EVERY == 0:
            commit(folder, step + 1, **state)
    loss = loss.detach()
    world.all_reduce(loss, mpidist.comm.AVG)
    if world.rank == 0:
        print(f"{steps} steps: loss {loss:.9f}", flush=True)
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=60, help="number of steps")
    parser.add_argument("--checkpoint", type=Path, default=Path("elastic-run"), help="folder")
    parser.add_argument("--kill", type=int, help="rank whose first process dies in the middle")
    # One process prints the help: its number in the job is the launcher's.
    options = parse(parser, int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    elastic.run(lambda: train(options.checkpoint, options.steps, options.kill))


if __name__ == "__main__":
    main()
