"""Samples from a simulation to a trainer: mpidist's coupling, plain mpi4py and Redis in turns.

mpirun --bind-to none -n 2 python benchmarks/bench_coupling.py

Process 0 sends windows of tensors to process 1, which reads one element of each and answers a
window. "mpi4py" is MPI_Send and MPI_Recv into three places in turns. "redis" is SET, a list of
keys, BLPOP and GET over a Unix socket of a server that process 0 starts (SmartSim's way to pass
tensors), where redis-server and the Python package redis are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidist.comm
from harness import benchmark_options, report, tables, timing
from harness.goals import format_bytes
from harness.job import Job
from harness.timing import Contender, Series

_KI, _MI = 1 << 10, 1 << 20
WINDOW = 16
_LONGEST_START_S = 10
_MOST_MEMORY = "2gb"

Way = Callable[[torch.Tensor], Callable[[], object]]


def main() -> None:
    options = benchmark_options.parser(__doc__, "quick", rounds=15).parse_args()
    if options.quick:
        options.rounds = 2
    results = []
    with Job() as job, contextlib.ExitStack() as stack:
        group, raw = job.group, job.raw
        timing.touch_memory()
        coupled = mpidist.comm.couple({"simulation": 1, "train": 1}, timeout_s=60)
        ways: dict[str, Way] = {"mpi4py": _plain(raw), "mpidist": _coupled(coupled, raw)}
        folder = group.broadcast_object(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(_redis(group, Path(folder)))
        if redis is not None:
            ways["redis"] = _through_redis(redis, raw)
        for size in (_MI,) if options.quick else (8, 64 * _KI, _MI, 16 * _MI):
            series = measure(raw, ways, size, options)
            results.append(
                {
                    "size_bytes": size,
                    "contenders": {s.name: report.series_record(s) for s in series},
                }
            )
            if raw.Get_rank() == 0:
                print(table(results[-1]), flush=True)
        coupled.close()
        if job.is_first:
            fields = {"window": WINDOW, "rounds": options.rounds, "results": results}
            job.write(options.output, "coupling", fields)


def measure(raw: Any, ways: dict[str, Way], size: int, options: argparse.Namespace) -> list[Series]:
    """Check and time each way; a pass is one sample.

    Collective: over both processes.
    """
    tensor = (torch.arange(size) % 251).to(torch.uint8)
    contenders = [Contender(name, (make(tensor),), ()) for name, make in ways.items()]
    burst_s = 0.01 if options.quick else 0.1
    series = timing.time_rounds(raw, contenders, options.rounds, burst_s)
    return [
        Series(s.name, s.passes_per_burst, WINDOW, tuple(t / WINDOW for t in s.rounds_us))
        for s in series
    ]


def table(result: dict[str, Any]) -> str:
    """Return one size's times and bandwidths, and mpi4py's time over each."""
    times = {name: each["median_us"] for name, each in result["contenders"].items()}
    size = result["size_bytes"]
    rows = [
        [name, f"{us:.1f}", f"{size / us / 1e3:.3g}", f"{times['mpi4py'] / us:.2f}"]
        for name, us in times.items()
    ]
    headers = ["samples of " + format_bytes(size), "us", "GB/s", "mpi4py's time over it"]
    return tables.text(rows, headers) + "\n"


def _answered(raw: Any) -> None:
    space = np.zeros(1, np.uint8)
    if raw.Get_rank() == 0:
        raw.Recv(space, 1, 9)
    else:
        raw.Send(space, 0, 9)


def _checked(seen: torch.Tensor, tensor: torch.Tensor) -> None:
    if seen.numel() != tensor.numel() or seen[-1] != tensor[-1]:
        raise RuntimeError("a sample came with other values")


def _plain(raw: Any) -> Way:
    def make(tensor: torch.Tensor) -> Callable[[], object]:
        # As many as a reader with a depth of 2 holds.
        places = [torch.empty_like(tensor) for _ in range(3)]

        def call() -> None:
            for number in range(WINDOW):
                if raw.Get_rank() == 0:
                    raw.Send(tensor.numpy(), 1, 1)
                else:
                    into = places[number % 3]
                    raw.Recv(into.numpy(), 0, 1)
                    _checked(into, tensor)
            _answered(raw)

        return call

    return make


def _coupled(coupled: Any, raw: Any) -> Way:
    outlet = coupled.outlet("train") if coupled.program == "simulation" else None
    inlet = coupled.inlet("simulation") if outlet is None else None

    def make(tensor: torch.Tensor) -> Callable[[], object]:
        def call() -> None:
            for _ in range(WINDOW):
                if outlet is not None:
                    outlet.put(tensor)
                else:
                    _checked(inlet.get().tensors[0], tensor)
            _answered(raw)

        return call

    return make


def _through_redis(client: Any, raw: Any) -> Way:
    def make(tensor: torch.Tensor) -> Callable[[], object]:
        def call() -> None:
            for number in range(WINDOW):
                if raw.Get_rank() == 0:
                    client.set(f"field{number}", memoryview(tensor.numpy()))
                    client.rpush("ready", f"field{number}")
                else:
                    key = client.blpop("ready")[1]
                    data = np.frombuffer(client.get(key), np.uint8)
                    _checked(torch.from_numpy(data.copy()), tensor)
            _answered(raw)

        return call

    return make


@contextlib.contextmanager
def _redis(group: Any, folder: Path) -> Iterator[Any]:
    """Yield a client of a server of this run; None on both processes where there is none."""
    has = shutil.which("redis-server") and importlib.util.find_spec("redis")
    if not all(group.all_gather_object(bool(has))):
        if group.rank == 0:
            print("redis is left out: redis-server or the Python package redis is not installed")
        yield None
        return
    import redis

    socket = folder / "redis.sock"
    server = None
    if group.rank == 0:
        command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", ""]
        command += ["--appendonly", "no", "--maxmemory", _MOST_MEMORY, "--dir", str(folder)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + _LONGEST_START_S
        while not socket.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        client = redis.Redis(unix_socket_path=str(socket))
        client.ping()
        yield client
        client.close()
        group.barrier()
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
