"""Small training under ``elastic.run``, as a job of its own, which dies where it is told to.

``python -m tests.elastic.training KIND FOLDER STEPS`` prints one line of JSON on each process: its
rank, the digest of weights and moments, and counts. In FOLDER/steps each rank writes its process
and its step, which a killer reads (``Steps``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mpidist.comm
import mpidist.ddp
from mpidist import elastic
from mpidist.checkpoint import commit, load
from mpidist.optim import OSS

KINDS = ("ddp", "powersgd", "oss", "torch", "rpc", "fsdp", "diloco")
_OF_TORCH = ("torch", "fsdp")  # on torch's default group
_MOST_RANKS = 16
_EVERY = 4  # steps between two commits


class Steps:
    """Table of the ranks' processes and steps, in a file that the job and its killer map."""

    def __init__(self, folder: Path) -> None:
        file = folder / "steps"
        # Each rank makes it, at the same time as others, and none may meet a shorter one.
        with open(file, "ab") as made:
            made.truncate(8 * 3 * _MOST_RANKS)
        # By rank: process id, its starts of the training, step.
        self.rows = np.memmap(file, np.int64, "r+", shape=(_MOST_RANKS, 3))


def _threads() -> int:
    """Return the number of threads when those of the world before have ended, or 5 s are over.

    Its store serves until all ranks have left it, and the timer of a recovery ends when it comes to
    run: both may be after the next start.
    """
    until = time.monotonic() + 5
    while time.monotonic() < until and any(
        thread.name in ("mpidist-store", "mpidist-deadline") for thread in threading.enumerate()
    ):
        time.sleep(1e-3)
    return threading.active_count()


class Training:
    """Training on this process, begun as often as ranks die.

    Args:
        kind: One of ``KINDS``.
        folder: Of the checkpoints, and of the table of steps.
        steps: Number of steps.
        dies: Called with rank and step before each step's optimizer.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        steps: int,
        dies: Callable[[int, int], object] = lambda rank, step: None,
        pause_s: float = 0.0,
    ) -> None:
        self.kind, self.folder, self.steps, self.dies = kind, folder, steps, dies
        self.pause_s = pause_s
        self.table = Steps(folder)
        self.starts: list[int] = []  # first steps
        self.sizes: list[int] = []
        # Threads, descriptors and node memory of this process at each start.
        self.counts: list[tuple[int, int]] = []
        self.first_steps: list[float] = []  # times

    def __call__(self) -> dict[str, Any]:
        """Train on, and return rank and digest."""
        self.counts.append((_threads(), len(os.listdir("/proc/self/fd"))))
        if self.kind in _OF_TORCH:
            dist.init_process_group("mpidist")
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            world = mpidist.comm.init()
            rank, size = world.rank, world.size
        state = self._state(rank, size)
        resumed = load(self.folder, **state)
        start = 0 if resumed is None else resumed.step
        self.starts.append(start)
        self.sizes.append(size)
        for step in range(start, self.steps):
            self.table.rows[rank] = os.getpid(), len(self.starts), step
            self._step(state, rank, size, step)
            if step == start:
                self.first_steps.append(time.time())
            if step % _EVERY == _EVERY - 1:
                commit(self.folder, step + 1, **state)
        if self.kind == "diloco":
            state["hook_state"].sync()
        digest = _digest(state)
        self._end()
        return {"rank": rank, "size": size, "digest": digest}

    def _state(self, rank: int, size: int) -> dict[str, Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
            torch.nn.Linear(64, 4),
        )  # fmt: skip
        state: dict[str, Any] = {}
        if self.kind == "fsdp":
            for layer in (net[0], net[2], net[4], net):
                fully_shard(layer, mesh=dist.init_device_mesh("cpu", (size,)))
            torch.manual_seed(100 + rank)
            return {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.01)}
        if self.kind == "diloco":
            torch.manual_seed(100 + rank)
            return {"model": net, "hook_state": _outer_steps(net)}
        wrapped = torch.nn.parallel.DistributedDataParallel
        if self.kind != "torch":
            wrapped = mpidist.ddp.DistributedDataParallel
        # Without unused parameters torch orders its buckets anew after a start's first step, and
        # sums of three ranks or more depend on their order in memory.
        more = {"find_unused_parameters": True} if self.kind == "torch" else {}
        model = state["model"] = wrapped(net, bucket_cap_mb=0.01, **more)
        if self.kind == "powersgd":
            hook_state = mpidist.ddp.PowerSGDState(
                None, 2, start_powerSGD_iter=2, min_compression_rate=1
            )
            model.register_comm_hook(hook_state, mpidist.ddp.powerSGD_hook)
            state["hook_state"] = hook_state
        if self.kind == "oss":
            state["optimizer"] = OSS(net.parameters(), torch.optim.Adam, lr=0.01)
        else:
            state["optimizer"] = torch.optim.Adam(net.parameters(), lr=0.01)
        if self.kind == "rpc":
            mpidist.rpc.init_rpc(f"worker{rank}")
        torch.manual_seed(100 + rank)
        return state

    def _step(self, state: dict[str, Any], rank: int, size: int, step: int) -> None:
        x = torch.randn(8, 32) + 0.01 * step
        if self.kind == "rpc":
            futures = [
                mpidist.rpc.rpc_async(f"worker{(rank + 1) % size}", torch.mul, (x, 0.5)),
                mpidist.rpc.rpc_async(f"worker{(rank + 2) % size}", torch.add, (x, float(rank))),
            ]
            x = sum(future.wait() for future in futures)
        optimizer = _optimizer_of(state)
        optimizer.zero_grad()
        state["model"](x).square().mean().backward()
        self.dies(rank, step)
        optimizer.step()
        if self.pause_s:
            time.sleep(self.pause_s)

    def _end(self) -> None:
        if self.kind == "rpc":
            mpidist.rpc.shutdown()
        if self.kind in _OF_TORCH:
            dist.destroy_process_group()
        else:
            mpidist.comm.default().close()


def _outer_steps(net: torch.nn.Module) -> mpidist.ddp.DiLoCo:
    """Return outer steps whose averages are on their way at some commits, and begin at others."""
    hook_state = mpidist.ddp.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    return mpidist.ddp.DiLoCo(
        net, torch.optim.Adam(net.parameters(), lr=0.01), every=6, fragments=2, overlap=2,
        hook=mpidist.ddp.powerSGD_hook, state=hook_state,
    )  # fmt: skip


def _optimizer_of(state: dict[str, Any]) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = (
        state["optimizer"] if "optimizer" in state else state["hook_state"].inner
    )
    return found


def _digest(state: dict[str, Any]) -> str:
    """Return a digest of weights and moments. Collective."""
    found = hashlib.sha256()
    optimizer = _optimizer_of(state)
    moments = (
        optimizer.state_dict(all_ranks=True)
        if isinstance(optimizer, OSS)
        else optimizer.state_dict()
    )
    net = getattr(state["model"], "module", state["model"])
    for value in [*net.state_dict().values(), *_tensors(moments["state"])]:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [one for key in sorted(tree, key=str) for one in _tensors(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [one for item in tree for one in _tensors(item)]
    return []


def dies_at(where: dict[int, int], folder: Path) -> Callable[[int, int], None]:
    """Return a function that kills each of these ranks at its step, once in the job."""

    def dies(rank: int, step: int) -> None:
        mark = folder / f"died-{rank}-{step}"
        if where.get(rank) == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return dies


def main(words: Sequence[str] | None = None) -> None:
    """Run one training, and print what it came to."""
    parser = argparse.ArgumentParser(prog="python -m tests.elastic.training", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds of a recovery")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds more of each step")
    options = parser.parse_args(words)
    training = Training(options.kind, options.folder, options.steps, pause_s=options.pause)
    result = elastic.run(training, timeout_s=options.timeout)
    line = {"starts": training.starts, "sizes": training.sizes, "counts": training.counts}
    if result is not None:
        print(json.dumps({**result, **line}), flush=True)


if __name__ == "__main__":
    main()
