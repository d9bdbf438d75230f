"""Time messages of mpidist, Gloo and mpi4py in one run, in turns, in the OSU benchmarks' terms.

mpirun --bind-to none -n 2 python benchmarks/bench_messages.py    (4 ranks: two pairs at once)

mpi4py's receives are plain MPI_Recv and MPI_Irecv, which Open MPI lets run past a shorter buffer;
"native" is mpidist's own API, "mpidist" torch's functions on mpidist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

import mpidist.comm
from collectives import messages as message_cases
from collectives.case import Ways
from collectives.messages import Case
from harness import bandwidth, benchmark_options, report, timing
from harness.job import Job

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
    parser = benchmark_options.parser(__doc__, "quick", rounds=15)
    parser.add_argument("--only", nargs="+", help="names of cases, for example latency")
    options = parser.parse_args()
    rounds, burst_s = (2, 0.001) if options.quick else (options.rounds, 0.02)
    with Job(uses_torch=True) as job:
        if job.group.size % 2:
            raise SystemExit("start an even number of ranks, which form pairs")
        ways = Ways(dist.new_group(backend="gloo"), job.raw, job.group, job.mpi)
        timing.touch_memory()
        found: dict[str, list[dict[str, Any]]] = {}
        for name, size, make in cases(ways, options.quick):
            if options.only and name not in options.only:
                continue
            series = measure(ways, make, rounds, burst_s)
            result = report.result_of(name, size, size, series)
            found.setdefault(name, []).append(result)
        if job.is_first:
            job.show()
            for name, results in found.items():
                report.print_by_operation(results, ", us a message")
                if name.startswith("window"):
                    rates = bandwidth.rate_table(results, job.group.size)
                    print(f"\n{name}: messages and bytes a second\n{rates}", flush=True)
            fields = {
                "rounds": rounds,
                "window": message_cases.WINDOW,
                "results": [result for results in found.values() for result in results],
            }
            job.write(options.output, "messages", fields)
        mpidist.comm.default().close()


if __name__ == "__main__":
    main()
