"""Jobs of ``bench_recovery``: a training that is killed, and calls under ULFM or not.

``job.py KIND FOLDER``, with a kind of ``mpidist``, ``restarts`` and ``gloo``, trains until
FOLDER/end is there, and writes lines of JSON with times to FOLDER, a file for each process.
``job.py calls FOLDER`` times collectives and a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_EVERY = 5  # steps between two commits or checkpoints
_WIDTH = 256
_CALLS, _ROUNDS = 50, 11


class Events:
    """File of this process's events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = open(folder / f"events-{os.getpid()}", "a", buffering=1)  # noqa: SIM115

    def write(self, kind: str, rank: int, step: int = 0) -> None:
        line = {"kind": kind, "rank": rank, "step": step, "at": time.time(), "pid": os.getpid()}
        self._file.write(json.dumps(line) + "\n")


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, _WIDTH)
    )


def _train(
    events: Events,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    start: int,
    keep: Callable[[int], object],
    agree: Callable[[bool], bool],
) -> None:
    step = start
    while True:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        model(torch.rand(16, _WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        step += 1
        events.write("step", rank, step)
        if step % _EVERY == 0:
            keep(step)
            if agree((events.folder / "end").exists()):
                return


def mpidist_training(folder: Path) -> None:
    """Train under ``elastic.run`` with mpidist's DDP, commits in memory."""
    import mpidist.comm
    from mpidist import elastic
    from mpidist.checkpoint import commit, load
    from mpidist.ddp import DistributedDataParallel
    from mpidist.elastic.warm_up import warm_up

    events = Events(folder)

    def warm() -> None:
        warm_up()
        events.write("warm", -1)

    def train() -> None:
        world = mpidist.comm.init()
        events.write("begin", world.rank)
        model = DistributedDataParallel(_net())
        optimizer = torch.optim.Adam(model.parameters())
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        resumed = load(folder, **state)

        def agree(flag: bool) -> bool:
            asked = torch.tensor([int(flag)])
            world.all_reduce(asked, mpidist.comm.MAX)
            return bool(asked)

        try:
            start = 0 if resumed is None else resumed.step
            keep = lambda step: commit(folder, step, **state)  # noqa: E731
            _train(events, model, optimizer, world.rank, start, keep, agree)
        except RuntimeError:
            events.write("error", world.rank)
            raise

    elastic.run(train, warm)


def gloo_training(folder: Path) -> None:
    """Train with torch's DDP on Gloo, checkpoints on the disk; torchrun starts it again."""
    events = Events(folder)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The agent's store lives on: a start finds the addresses of the one before under its own keys.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(address, port, is_master=False)
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    events.write("begin", rank)
    model = torch.nn.parallel.DistributedDataParallel(_net())
    optimizer = torch.optim.Adam(model.parameters())
    file, start = folder / "checkpoint.pt", 0
    if file.exists():
        found = torch.load(file)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        start = found["step"]

    def keep(step: int) -> None:
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, f"{file}.part")
            os.replace(f"{file}.part", file)

    def agree(flag: bool) -> bool:
        asked = torch.tensor([int(flag)])
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    _train(events, model, optimizer, rank, start, keep, agree)
    dist.destroy_process_group()


def calls(folder: Path) -> None:
    """Time all-reduces, a barrier, a message and a step; write medians in microseconds."""
    import mpidist.comm
    from mpidist.ddp import DistributedDataParallel

    world = mpidist.comm.init()
    small, large = torch.ones(2), torch.ones(1 << 18)
    model = DistributedDataParallel(_net())
    x = torch.rand(16, _WIDTH)

    def message() -> None:
        if world.rank == 0:
            world.send(small, 1)
            world.recv(small, 1)
        elif world.rank == 1:
            world.recv(small, 0)
            world.send(small, 0)

    cases = {
        "all_reduce, 8 B": lambda: world.all_reduce(small),
        "all_reduce, 1 MiB": lambda: world.all_reduce(large),
        "barrier": world.barrier,
        "round trip, 8 B": message,
        "step of DDP": lambda: model(x).square().mean().backward(),
    }
    found = {}
    for name, call in cases.items():
        rounds = []
        for _ in range(_ROUNDS):
            world.barrier()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                call()
            rounds.append((time.perf_counter() - begin) / _CALLS * 1e6)
        found[name] = statistics.median(rounds)
    if world.rank == 0:
        (folder / "calls").write_text(json.dumps(found))


def main() -> None:
    torch.set_num_threads(1)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    with contextlib.suppress(KeyboardInterrupt):
        # Without ULFM a death ends the ranks, which the launcher starts again.
        kinds = {"mpidist": mpidist_training, "restarts": mpidist_training, "gloo": gloo_training}
        {**kinds, "calls": calls}[kind](folder)


if __name__ == "__main__":
    main()
