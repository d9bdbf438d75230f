"""Time one item among 10² to 10⁵: receives, calls, references, gradients, sharded parameters.

mpirun --bind-to none -n 2 python benchmarks/bench_growth.py
"""

from __future__ import annotations

import mpidist.comm
import mpidist.rpc
from collectives import growth, growth_cases
from harness import benchmark_options, timing
from harness.job import Job


def main() -> None:
    parser = benchmark_options.parser(__doc__, "quick", rounds=5)
    names = [case.name for case in growth_cases.CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--most", type=int, default=100_000, help="largest number of items")
    options = parser.parse_args()
    least, most, rounds = (10, 100, 1) if options.quick else (100, options.most, options.rounds)
    with Job() as job:
        group = job.group
        job.show()
        timing.touch_memory()
        results: dict[str, growth.Found] = {}
        for case in growth_cases.CASES:
            if options.only and case.name not in options.only:
                continue
            if case.uses_rpc:
                mpidist.rpc.init_rpc(f"worker{group.rank}", group=group)
            sizes = growth.numbers(least, min(most, case.most))
            works = {items: case.make(group, items) for items in sizes}
            results[case.name] = growth.measure(group, works, rounds)
            del works
            if case.uses_rpc:
                mpidist.rpc.shutdown()
            if job.is_first:
                print(f"{case.name}: {growth.verdict(results[case.name])}", flush=True)
        if job.is_first:
            print(growth.table(results))
            fields, part = {"rounds": rounds, "results": results}, "part" * bool(options.only)
            job.write(options.output, "growth", fields, parts=[part])


if __name__ == "__main__":
    main()
