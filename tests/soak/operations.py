"""Operations of a soak on one rank: programs, models and graphs of other tests, one after another.

Each is collective over the world, and leaves nothing behind.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mpidist.rpc as rpc
from mpidist import checkpoint
from mpidist.ddp.hooks.default import bf16_compress_hook
from mpidist.optim import OSS
from tests.autograd import random_graphs
from tests.checkpoint.runs import Run
from tests.fuzz import generator, models, run_models, run_programs
from tests.fuzz.deadline import Deadline
from tests.rpc import call_graphs
from tests.soak.plan import Operation
from tests.zero.stateful import same

_CALLS = 50
_THREADS = 3  # that make groups at the same time
_RUNS = ("adam", "oss-greedy", "oss-flat", "powersgd", "torch")


def used(reference: Any) -> Any:
    """Return the value of a reference on a worker that then drops it."""
    return reference.to_here()


class Operations:
    """Operations in one world.

    Args:
        world: All ranks; torch's default group and RPC are there, too.
        folder: For checkpoints, the same on all ranks.
        step: Number of the last commit or checkpoint there.

    Attributes:
        step: Number of the last one by now.
    """

    def __init__(self, world: Any, folder: Path, deadline: Deadline, step: int) -> None:
        self._world, self._folder, self._deadline, self.step = world, folder, deadline, step
        self._of_kind: dict[str, Callable[[int], list[str]]] = {
            "collectives": self._collectives,
            "groups": self._groups,
            "ddp": self._ddp,
            "oss": self._oss,
            "commit": self._commit,
            "save": self._save,
            "calls": self._calls,
            "autograd": self._autograd,
        }

    def run(self, operation: Operation) -> list[str]:
        """Run an operation; return the failures of all ranks."""
        return self._of_kind[operation.kind](operation.seed)

    def _collectives(self, seed: int) -> list[str]:
        program = generator.program(seed, self._world.size)
        return run_programs.run(program, self._world, self._deadline)

    def _ddp(self, seed: int) -> list[str]:
        model = models.model(seed, self._world.size)
        return run_models.run(model, self._world, self._deadline)

    def _groups(self, seed: int) -> list[str]:
        failures: list[str] = []
        threads = [
            threading.Thread(target=self._group, args=(number, seed, failures))
            for number in range(_THREADS)
        ]
        # Another order on each rank.
        random.Random(seed + self._world.rank).shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._of_all(failures)

    def _group(self, number: int, seed: int, failures: list[str]) -> None:
        rng = random.Random(f"group {number} {seed}")
        ranks = rng.sample(range(self._world.size), rng.randint(1, self._world.size))
        group = self._world.new_group(ranks, f"soak {number}")
        if group is None:
            return
        values = [torch.full((count,), float(group.rank + 1)) for count in (1, 1000, 100_000)]
        works = [group.all_reduce(tensor, async_op=rng.random() < 0.5) for tensor in values]
        child = group.clone() if rng.random() < 0.5 else group.split(0)
        gathered = child.all_gather_object(child.rank)
        child.close()
        for work in filter(None, works):
            work.wait()
        group.close()
        expected = group.size * (group.size + 1) / 2
        if gathered != [*range(len(ranks))] or any((one != expected).any() for one in values):
            failures.append(f"group {number} of {ranks}: {gathered}, {[one[0] for one in values]}")

    def _oss(self, seed: int) -> list[str]:
        rng = random.Random(f"oss {seed}")
        run = self._run(rng, ("oss-greedy", "oss-flat"))
        if rng.random() < 0.3:
            run.model.register_comm_hook(None, bf16_compress_hook)
        run.train(2)
        to = rng.randrange(self._world.size)
        optimizer: OSS = run.optimizer
        optimizer.consolidate_state_dict(to, chunk_bytes=256)
        state = optimizer.state_dict() if self._world.rank == to else None
        whole = optimizer.state_dict(all_ranks=True)
        ok = state is None or same(whole, state)
        other = Run(self._world, rng.choice(("oss-greedy", "oss-flat")), seed + 1)
        other.optimizer.load_state_dict(whole)
        ok = ok and same(other.moments(), whole)
        return self._of_all([] if ok else ["other state"])

    def _commit(self, seed: int) -> list[str]:
        return self._kept(random.Random(f"commit {seed}"), checkpoint.commit)

    def _save(self, seed: int) -> list[str]:
        return self._kept(random.Random(f"save {seed}"), checkpoint.save)

    def _kept(self, rng: random.Random, keeps: Callable[..., object]) -> list[str]:
        """Keep the state of a run, and go on from it in another run."""
        kind = rng.choice(_RUNS)
        run = self._run(rng, (kind,))
        run.train(2)
        self.step += 1
        keeps(self._folder, self.step, **run.state(), group=self._world)
        expected = run.train(2)
        resumed = Run(self._world, kind, seed=7)
        found = checkpoint.load(self._folder, **resumed.state(), group=self._world)
        ok = found.step == self.step and resumed.train(2) == expected
        return self._of_all([] if ok else [f"{found} in place of step {self.step}"])

    def _run(self, rng: random.Random, kinds: tuple[str, ...]) -> Run:
        return Run(self._world, rng.choice(kinds), rng.randrange(100))

    def _calls(self, seed: int) -> list[str]:
        rng = random.Random(f"calls {seed} {self._world.rank}")
        others = [rng.randrange(self._world.size) for _ in range(_CALLS)]
        futures = [rpc.rpc_async(to, max, args=(to, place)) for place, to in enumerate(others)]
        answers = [future.wait() for future in futures]
        made = [rpc.remote(to, max, args=(to, place)) for place, to in enumerate(others)]
        # On a worker that is not their owner, which drops them.
        answers += [rpc.rpc_sync(0, used, args=(rref,)) for rref in made]
        if answers != 2 * [max(to, place) for place, to in enumerate(others)]:
            return self._of_all(["other answers"])
        for _ in range(3):
            call_graphs.judge(call_graphs.node(rng, self._world.size))
        self._world.barrier()
        return self._of_all(call_graphs.take_wrong())

    def _autograd(self, seed: int) -> list[str]:
        own = seed * self._world.size + self._world.rank
        mode = "smart" if seed % 3 else "fast"
        wrong = random_graphs.complaint(
            own, self._world.size, mode, hooks=seed % 2 == 0, unused=mode == "smart"
        )
        return self._of_all([wrong] if wrong else [])

    def _of_all(self, failures: list[str]) -> list[str]:
        return run_programs.gathered_failures(self._world, failures, {})
