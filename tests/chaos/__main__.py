"""Chaos by seeds: trainings whose ranks are killed, each compared with the undisturbed one.

python -m tests.chaos --seed 0 --count 200
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.chaos import run as chaos
from tests.elastic.training import KINDS


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    expected: dict[tuple[str, int], dict[int, str]] = {}
    bad = 0
    for seed in range(options.seed, options.seed + options.count):
        case = chaos.drawn(seed, tuple(options.kinds))
        key = case.kind, case.ranks
        if key not in expected:
            expected[key] = chaos.undisturbed(case)
        begin = time.monotonic()
        outcome = chaos.run(case)
        wrong = chaos.problems(case, outcome, expected[key])
        bad += bool(wrong)
        print(
            f"seed {seed}: {case.kind}, {case.ranks} ranks, {case.spares} spares, "
            f"{', '.join(map(str, case.blows))}; {len(outcome.killed)} killed, "
            f"{time.monotonic() - begin:.1f} s: {'; '.join(wrong) or 'as undisturbed'}",
            flush=True,
        )
        if wrong:
            print(outcome.text[-6000:], flush=True)
    print(f"{bad} of {options.count} went wrong")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
