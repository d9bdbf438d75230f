"""Time one-sided access: put + signal against MPI's own put, messages, and a copy of memory.

mpirun --bind-to none -n 2 python benchmarks/bench_windows.py
mpirun --bind-to none -n 2 python benchmarks/bench_windows.py --references    # RPC's to_here
mpirun --bind-to none -n 2 python benchmarks/bench_windows.py --shards        # OSS's all-gather
benchmarks/slow_link.sh 1gbit MPIRUN python benchmarks/bench_windows.py    (MPICH's mpirun)
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness import benchmark_options, report, timing
from harness.goals import Goal, format_bytes, judge
from harness.job import Job
from optimizer import window_shards
from rpc import window_references

_SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
_LARGE = 16 << 20
GOALS = (
    Goal(
        "put + signal to wait_signal, 8 B: time over that of MPI's put + flush ≤ 2",
        "put and signal", "mpidist", "mpi4py", "ratio_of_rounds", 2.0, False, lambda s: s == 8,
    ),
    Goal(
        "put + signal to wait_signal, 8 B: time over that of send and recv ≤ 1.2",
        "put and signal", "mpidist", "send and recv", "ratio_of_rounds", 1.2, False,
        lambda s: s == 8,
    ),
    Goal(
        "put within a node, 16 MiB: memcpy's time over ours ≥ 0.9",
        "put", "memcpy", "mpidist", "ratio_of_rounds", 0.9, True, lambda s: s == _LARGE,
    ),
)  # fmt: skip


class Raw:
    """mpi4py's put + flush, and a wait in which the target looks at its own memory.

    A put of 8 bytes is itself the count that the target waits for; of a longer one, the count is a
    second put.
    """

    def __init__(self, comm: Any, nbytes: int, is_single_node: bool) -> None:
        from mpi4py import MPI

        allocate = MPI.Win.Allocate_shared if is_single_node else MPI.Win.Allocate
        self._win = allocate(nbytes + 8, 1, MPI.INFO_NULL, comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self._bytes = memoryview(self._win.tomemory()).cast("B")
        self._seen = self._bytes[:8].cast("q")
        self._seen[0] = 0
        self._win.Sync()
        comm.Barrier()
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        count = bytearray(8)
        self._count = memoryview(count).cast("q")
        self._data = (MPI.buffer.fromaddress(self._source.data_ptr(), nbytes), nbytes, MPI.BYTE)
        self._flag = (count, 8, MPI.BYTE)
        self._sent = self._waited = 0
        self._nbytes, self._peer = nbytes, 1 - comm.Get_rank()
        # Between nodes MPI moves one-sided data while the target calls it.
        self._advance = self._win.Sync if is_single_node else comm.Iprobe
        self._type = MPI.BYTE

    def put(self) -> None:
        """Write the data and the count."""
        self._sent += 1
        self._count[0] = self._sent
        win, peer, nbytes = self._win, self._peer, self._nbytes
        if nbytes > 8:
            win.Put(self._data, peer, (8, nbytes, self._type))
            win.Flush(peer)
        win.Put(self._flag, peer, (0, 8, self._type))
        win.Flush(peer)

    def wait(self) -> None:
        """Wait for the peer's next put."""
        self._waited += 1
        while self._seen[0] < self._waited:
            self._advance()
        self._win.Sync()

    def check(self) -> bool:
        """Return whether the data have arrived."""
        return self._nbytes == 8 or bytes(self._bytes[8:]) == bytes([1]) * self._nbytes

    def free(self) -> None:
        """Free the window. Collective."""
        self._seen.release()
        self._bytes.release()
        self._win.Unlock_all()
        self._win.Free()


class Case:
    """One size: the contenders' calls, their windows and their memory."""

    def __init__(self, group: Any, raw_comm: Any, nbytes: int) -> None:
        self._group, self._peer = group, 1 - group.rank
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._into = torch.zeros(nbytes, dtype=torch.uint8)
        self._mapped = group.window(size=nbytes, dtype=torch.uint8)
        self._plain = group.window(torch.zeros(nbytes, dtype=torch.uint8))
        self._raw = Raw(raw_comm, nbytes, group.is_single_node)
        self._private = torch.zeros(nbytes, dtype=torch.uint8)

    def round_trips(self) -> list[timing.Contender]:
        """Return the contenders of a put and its signal, there and back."""
        group, peer, source, into = self._group, self._peer, self._source, self._into

        def through(
            window: Any, is_async: bool
        ) -> tuple[Callable[[], object], Callable[[], object]]:
            def go() -> None:
                window.put(source, peer, 0, is_async)
                window.signal(peer)

            return go, lambda: window.wait_signal(peer)

        pairs = {
            "mpidist": through(self._mapped, False),
            "messages": through(self._plain, True),
            "send and recv": (lambda: group.send(source, peer), lambda: group.recv(into, peer)),
            "mpi4py": (self._raw.put, self._raw.wait),
        }
        return [
            timing.Contender(name, pair if group.rank == 0 else pair[::-1], ())
            for name, pair in pairs.items()
        ]

    def copies(self) -> list[timing.Contender]:
        """Return the contenders of one rank's copy while the other waits."""
        window, peer, source = self._mapped, self._peer, self._source
        own, private, nbytes = window.tensor, self._private, source.nbytes
        calls: dict[str, Callable[[], object]] = {
            "mpidist": lambda: window.put(source, peer),
            "memcpy": lambda: ctypes.memmove(private.data_ptr(), source.data_ptr(), nbytes),
            "memcpy, node memory": lambda: ctypes.memmove(
                own.data_ptr(), source.data_ptr(), nbytes
            ),
        }
        return [
            timing.Contender(name, (call,) if self._group.rank == 0 else (), ())
            for name, call in calls.items()
        ]

    def maps(self) -> list[timing.Contender]:
        """Return the contenders of the peer's tensor: mapped, and copied."""
        window, peer = self._mapped, self._peer
        mapped, private = window.map_remote_tensor(peer), self._private
        calls: dict[str, Callable[[], object]] = {
            "mpidist": lambda: window.map_remote_tensor(peer),
            "copy": lambda: private.copy_(mapped),
        }
        return [timing.Contender(name, (call,), ()) for name, call in calls.items()]

    def require(self) -> None:
        """Check what every contender has written.

        Raises:
            RuntimeError: Wrong on this rank.
        """
        written = {
            "mpidist": self._mapped.tensor,
            "messages": self._plain.tensor,
            "send and recv": self._into,
        }
        wrong = [name for name, tensor in written.items() if not bool((tensor == 1).all())]
        wrong += [] if self._raw.check() else ["mpi4py"]
        if self._group.is_single_node:
            first = self._mapped.map_remote_tensor(self._peer)
            again = self._mapped.map_remote_tensor(self._peer)
            wrong += [] if first.data_ptr() == again.data_ptr() else ["map_remote_tensor copies"]
        if wrong:
            raise RuntimeError(f"wrong result of {', '.join(wrong)}")

    def free(self) -> None:
        """Give the windows up. Collective."""
        self._mapped.tensor_deregister()
        self._plain.tensor_deregister()
        self._raw.free()


def main() -> None:
    options = _arguments()
    with Job() as job:
        group, raw = job.group, job.raw
        if group.size != 2:
            raise SystemExit("start two ranks: one writes to the other, and back")
        timing.touch_memory()
        how = options.rounds, options.burst_s
        if options.references:
            if not group.is_single_node:
                raise SystemExit("--references needs two ranks on one node: others map no memory")
            case, goals = "references", ()
            sizes = tuple(options.sizes or window_references.SIZES)
            found = window_references.measure(group, job.mpi.COMM_SELF, sizes, *how)
        elif options.shards:
            case, goals = "shards", ()
            sizes = tuple(options.sizes or window_shards.SIZES)
            found = window_shards.measure(group, raw, sizes, *how)
        else:
            case, goals = "", GOALS
            found = _measure(group, raw, tuple(options.sizes or _SIZES), *how)
        results = [report.result_of(name, nbytes, nbytes, series) for name, nbytes, series in found]
        if job.is_first:
            report.print_by_operation(results)
            verdicts = judge(results if group.is_single_node else [], goals)
            fields = {"link": options.link, "rounds": options.rounds, "results": results}
            job.write(options.output, "windows", fields, verdicts, [options.link], case)


def _measure(
    group: Any, raw: Any, sizes: Sequence[int], rounds: int, burst_s: float
) -> list[tuple[str, int, list[timing.Series]]]:
    """Time and check puts and signals; return operation, size and series. Collective."""
    found = []
    for nbytes in sizes:
        case = Case(group, raw, nbytes)
        kinds = {"put and signal": case.round_trips()}
        if group.is_single_node:
            kinds |= {"put": case.copies(), "map_remote_tensor": case.maps()}
        for operation, contenders in kinds.items():
            series = timing.time_rounds(raw, contenders, rounds, burst_s)
            found.append((operation, nbytes, series))
        case.require()
        case.free()
    return found


def _arguments() -> argparse.Namespace:
    parser = benchmark_options.parser(__doc__, "link", rounds=15, burst_s=0.02)
    listed = ", ".join(map(format_bytes, _SIZES))
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="BYTES", help=f"default of puts: {listed}"
    )
    cases = parser.add_mutually_exclusive_group()
    cases.add_argument(
        "--references", action="store_true", help="only values of RPC's remote references"
    )
    cases.add_argument(
        "--shards", action="store_true", help="only the all-gather of a sharded optimizer"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
