"""Program of others that runs in the ranks of a job beside busy groups of mpidist.

python -m tests.peers.beside_groups FILE ARGUMENTS

Threads of each rank run collectives over groups of their own while the program runs in the main
thread. They end together: each sum has one element in which a rank says that its program has ended.
"""

from __future__ import annotations

import runpy
import sys
import threading

import torch

# A job says it when its program has ended, and each collective beside it was right.
SAID = "rounds of collectives beside the program"
_THREADS = 2
# Without pauses the threads of all ranks poll in MPI at the same time, and the program's many small
# calls wait for a core.
_PAUSE_S = 0.02


class Busy:
    """Groups that are kept busy by a thread each.

    Collective: construction and ``stop``, over the ranks of the job.
    """

    def __init__(self) -> None:
        from mpidist.comm import init

        world = init()
        self._over = threading.Event()
        self.rounds = [0] * _THREADS
        self.wrong: list[str] = []
        groups = [world.new_group(range(world.size), f"busy{n}") for n in range(_THREADS)]
        self._threads = [
            threading.Thread(target=self._run, args=(number, group))
            for number, group in enumerate(groups)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, group) -> None:
        ended = False
        while not ended:
            values = torch.full((257,), float(group.rank + 1))
            values[0] = float(self._over.wait(_PAUSE_S))
            group.all_reduce(values)
            gathered = torch.empty(group.size, dtype=torch.int64)
            group.all_gather_into_tensor(gathered, torch.tensor([group.rank]))
            expected = group.size * (group.size + 1) / 2
            if not (values[1:] == expected).all() or gathered.tolist() != [*range(group.size)]:
                self.wrong.append(f"round {self.rounds[number]} of group {number}")
            ended = bool(values[0] == group.size)
            self.rounds[number] += 1
        group.close()

    def stop(self) -> None:
        """End the threads.

        Raises:
            RuntimeError: A collective gave a wrong result, or a thread has run none.
        """
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self.wrong or min(self.rounds) == 0:
            raise RuntimeError(f"groups beside the program: {self.wrong}, rounds {self.rounds}")


def search_first(package: str) -> None:
    """Move a package and its modules to the beginning of ``sys.modules``.

    pickle looks through all modules, in their order, for a function that does not name its own, as
    those of mpi4py do not. A suite that pickles thousands of datatypes takes minutes when torch's
    modules come first.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] != package]:
        sys.modules[name] = sys.modules.pop(name)


def main() -> None:
    """Run the program of the command line."""
    from mpidist.comm import init

    init()
    search_first("mpi4py")
    busy = Busy()
    sys.argv = sys.argv[1:]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    status: object = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    busy.stop()
    print(f"{SAID}: {busy.rounds}", flush=True)
    sys.exit(status)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
