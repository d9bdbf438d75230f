"""Fuzzing of collective programs and data-parallel models on the ranks of a job.

mpirun -n 3 python -m tests.fuzz programs --count 10000 --seed 0
mpirun -n 3 python -m tests.fuzz models --count 1000 --seed 0

Each seed is one program or model. The first failure is reported with the command that repeats it
and, if all ranks reached the end, with the fewest steps that still fail; the exit status is then 1
on all ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import warnings
from typing import Any

from mpidist.comm import init
from tests.fuzz import generator, models, programs, run_models, run_programs
from tests.fuzz.deadline import Deadline


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=("programs", "models"))
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed")
    parser.add_argument(
        "--without",
        default="",
        help="features to leave out, by their names in programs.py and models.py",
    )
    parser.add_argument(
        "--only", default="", help="steps of the program to keep, separated by commas"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one of them")
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first that fails"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the program in place of running it"
    )
    options = parser.parse_args()
    known = (*programs.FEATURES, *models.FEATURES)
    without = tuple(filter(None, options.without.split(",")))
    if unknown := set(without) - set(known):
        parser.error(f"no feature {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    faulthandler.enable()
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    world = init()
    if options.show:
        if world.rank == 0:
            _show(options, without, world.size)
        return 0
    with run_programs.torch_default_group():
        if options.what == "models":
            run_models.warm_up()
        return _Fuzzer(options, without, world).run()


class _Fuzzer:
    def __init__(self, options: Any, without: tuple[str, ...], world: Any) -> None:
        self._options, self._without, self._world = options, without, world
        self._deadline = Deadline(options.limit, world.rank)
        self._only = tuple(int(place) for place in options.only.split(",") if place)

    def run(self) -> int:
        """Run all seeds; return the exit status, which is equal on all ranks."""
        first, count = self._options.seed, self._options.count
        start = told_at = time.monotonic()
        failed = 0
        for seed in range(first, first + count):
            if self._world.rank == 0 and time.monotonic() - told_at > 10:
                told_at = time.monotonic()
                self._print(
                    f"{seed - first} of {count} {self._options.what}, now seed {seed}, "
                    f"{told_at - start:.0f} s"
                )
            failures = self._one(seed, self._only)
            if not failures:
                continue
            failed += 1
            self._report(seed, failures)
            if not self._options.keep_going:
                break
        self._print(
            f"{failed} failed; seeds {first} to {seed}, {self._world.size} ranks, "
            f"{time.monotonic() - start:.0f} s"
        )
        return 1 if failed else 0

    def _one(self, seed: int, only: tuple[int, ...] = (), is_quiet: bool = False) -> list[str]:
        self._deadline.start(self._repeat(seed, only))
        try:
            if self._options.what == "models":
                return run_models.run(
                    models.model(seed, self._world.size, self._without), self._world, self._deadline
                )
            drawn = generator.program(seed, self._world.size, self._without)
            drawn = programs.kept(drawn, only) if only else drawn
            return run_programs.run(drawn, self._world, self._deadline, is_quiet)
        finally:
            self._deadline.stop()

    def _report(self, seed: int, failures: list[str]) -> None:
        self._print(f"seed {seed} failed on {self._world.size} ranks:")
        for failure in failures[:4]:
            self._print(f"  {failure}")
        self._print(f"  repeat: {self._repeat(seed, self._only)}")
        if self._options.what == "models":
            self._print(
                f"  {programs.described(models.model(seed, self._world.size, self._without))}"
            )
        else:
            only = self._shrunk(seed)
            drawn = programs.kept(generator.program(seed, self._world.size, self._without), only)
            self._print(f"  the fewest steps that fail: {self._repeat(seed, only)}")
            self._print(f"    ranks on: {drawn.nodes}")
            for group in drawn.groups:
                self._print(f"    {programs.described(group)}")
            for step in drawn.steps:
                self._print(f"    {programs.described(step)}")

    def _shrunk(self, seed: int) -> tuple[int, ...]:
        """Drop steps one by one while the program still fails."""
        steps = generator.program(seed, self._world.size, self._without).steps
        only = self._only or tuple(range(len(steps)))
        only = tuple(
            place for place in only if not isinstance(steps[place], (programs.Make, programs.Close))
        )
        for place in reversed(only):
            rest = tuple(other for other in only if other != place)
            if rest and self._one(seed, rest, is_quiet=True):
                only = rest
        return only

    def _repeat(self, seed: int, only: tuple[int, ...]) -> str:
        words = (
            f"mpirun -n {self._world.size} python -m tests.fuzz {self._options.what} --seed "
            f"{seed} --count 1"
        )
        words += f" --without {','.join(self._without)}" if self._without else ""
        return words + (f" --only {','.join(map(str, only))}" if only else "")

    def _print(self, line: str) -> None:
        if self._world.rank == 0:
            print(line, flush=True)


def _show(options: Any, without: tuple[str, ...], size: int) -> None:
    for seed in range(options.seed, options.seed + options.count):
        if options.what == "models":
            print(models.model(seed, size, without))
            continue
        drawn = generator.program(seed, size, without)
        print(
            f"seed {seed}, ranks on: {drawn.nodes}",
            *map(programs.described, drawn.groups),
            sep="\n  ",
        )
        for place, step in enumerate(drawn.steps):
            print(f"  {place}: {programs.described(step)}")


if __name__ == "__main__":
    sys.exit(main())
