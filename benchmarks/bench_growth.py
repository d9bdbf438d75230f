"""Time one item among 10² to 10⁵: receives, calls, references, gradients, sharded parameters.

mpirun --bind-to none -n 2 python benchmarks/bench_growth.py
"""

from __future__ import annotations

import argparse

import torch

import mpidist.comm
import mpidist.rpc
from collectives import growth, growth_cases
from harness import benchmark_options, environment, plots, report, timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in growth_cases.CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=100_000, help="largest number of items")
    benchmark_options.add_quick(parser)
    benchmark_options.add_output(parser)
    options = parser.parse_args()
    least, most, rounds = (10, 100, 1) if options.quick else (100, options.most, options.rounds)
    torch.set_num_threads(1)
    group = mpidist.comm.init()
    benchmark_options.require_two_ranks(group.size)
    from mpi4py import MPI

    about = environment.describe(MPI.COMM_WORLD)
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
        if group.rank == 0:
            print(f"{case.name}: {growth.verdict(results[case.name])}", flush=True)
    if group.rank == 0:
        print(f"\n{about['mpi_library']}, torch {about['torch']}, {about['ranks']} ranks")
        print(f"{environment.binding(about)}; load average {about['load_average'][0]}")
        print(growth.table(results))
        record = {
            "benchmark": "growth",
            "environment": about,
            "rounds": rounds,
            "results_checked": True,
            "results": results,
        }
        part = "-part" if options.only else ""
        path = (
            options.output / f"growth-{environment.library_name(about)}-{about['ranks']}{part}.json"
        )
        report.write_json(record, path)
        print(plots.beside(path))


if __name__ == "__main__":
    main()
