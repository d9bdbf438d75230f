"""Time messages of mpidist, Gloo and mpi4py in one run, in turns, in the OSU benchmarks' terms.

mpirun --bind-to none -n 2 python benchmarks/bench_messages.py    (4 ranks: two pairs at once)

mpi4py's receives are plain MPI_Recv and MPI_Irecv, which Open MPI lets run past a shorter buffer;
"native" is mpidist's own API, "mpidist" torch's functions on mpidist.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import mpidist.comm
from collectives import messages as message_cases
from collectives.case import Ways
from collectives.messages import Case
from harness import bandwidth, benchmark_options, environment, plots, report, timing

_KI, _MI = 1 << 10, 1 << 20


def cases(ways: Ways, is_quick: bool) -> Iterator[tuple[str, int, Callable[[], Case]]]:
    """Yield name, bytes of a message, and the case."""
    for size in (8, 64 * _KI) if is_quick else (8, 4 * _KI, 64 * _KI, _MI):
        yield "latency", size, lambda size=size: message_cases.latency(ways, size, False)
    yield "latency, fresh tensors", 8, lambda: message_cases.latency(ways, 8, True)
    for size in (8,) if is_quick else (8, 64 * _KI):
        yield "exchange", size, lambda size=size: message_cases.exchange(ways, size)
    for size in (8,) if is_quick else (8, 4 * _KI, _MI):
        yield "window", size, lambda size=size: message_cases.rate(ways, size)
        yield "window both ways", size, lambda size=size: message_cases.both_ways(ways, size)
    for count in (10, 100) if is_quick else (100, 1000, 4000):
        yield f"{count} posted tags", 8, lambda count=count: message_cases.posted(ways, count)


def measure(ways: Ways, make: Callable[[], Case], rounds: int, burst_s: float) -> Any:
    """Check each contender once, and time all in turns; return the series of one message.

    Collective: over all ranks.

    Raises:
        RuntimeError: A contender did not bring the values.
    """
    case = make()
    for contender in case.contenders:
        for call in contender.calls:
            call()
        case.check()
    return message_cases.per_message(
        timing.time_rounds(ways.raw, case.contenders, rounds, burst_s), case
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", help="names of cases, for example latency")
    benchmark_options.add_quick(parser)
    benchmark_options.add_output(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("mpidist")
    if dist.get_world_size() % 2:
        raise SystemExit("start an even number of ranks, which form pairs")
    gloo = dist.new_group(backend="gloo")
    # mpidist prepares the MPI library before the import of mpi4py.MPI starts MPI.
    from mpi4py import MPI

    ways = Ways(gloo, MPI.COMM_WORLD.Dup(), mpidist.comm.init(), MPI)
    about = environment.describe(ways.raw)
    is_first = ways.rank == 0
    timing.touch_memory()
    rounds, burst_s = (2, 0.001) if options.quick else (options.rounds, 0.02)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, size, make in cases(ways, options.quick):
        if options.only and name not in options.only:
            continue
        series = measure(ways, make, rounds, burst_s)
        result = report.result_of(name, size, size, series)
        found.setdefault(name, []).append(result)
    if is_first:
        print(f"{about['mpi_library']}, torch {about['torch']}, {about['ranks']} ranks")
        print(f"{environment.binding(about)}; load average {about['load_average'][0]}")
        for name, results in found.items():
            print(f"\n{name}, us a message\n{report.table(results)}", flush=True)
            if name.startswith("window"):
                rates = bandwidth.rate_table(results, about["ranks"])
                print(f"\n{name}: messages and bytes a second\n{rates}", flush=True)
        path = options.output / f"messages-{environment.library_name(about)}-{about['ranks']}.json"
        record = {
            "benchmark": "messages",
            "environment": about,
            "rounds": rounds,
            "window": message_cases.WINDOW,
            "results": [result for results in found.values() for result in results],
        }
        report.write_json(record, path)
        print(f"\n{plots.beside(path)}")
    ways.raw.Barrier()
    ways.raw.Free()
    mpidist.comm.default().close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
