"""Command ``python -m tests.bytes_fuzz --count 1000000 --seed 0 [--only tables] [--case HEX]``.

The first case of a target that crashes, hangs, takes memory, or has a forbidden effect is printed
as hex; ``--only TARGET --case HEX`` reads it again. The exit status is then 1.
"""

from __future__ import annotations

import argparse
import sys

from tests.bytes_fuzz import watching
from tests.bytes_fuzz.targets import SHARES, TARGETS


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bytes_fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="cases, of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        default=",".join(TARGETS),
        help=f"targets, separated by commas: {', '.join(TARGETS)}",
    )
    parser.add_argument(
        "--case", default=None, help="bytes of one case as hex; needs --only with its target"
    )
    options = parser.parse_args()
    targets = options.only.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if options.case is not None and len(targets) != 1:
        parser.error("--case needs --only with one target")
    shares = [SHARES[target] for target in targets]
    counts = [max(1, options.count * share // sum(shares)) for share in shares]
    case = bytes.fromhex(options.case) if options.case is not None else None
    is_wrong = False
    for result in watching.results(targets, counts, options.seed, case):
        if "error" in result:
            is_wrong = True
            print(
                f"{result['target']}: {result['error']}\n{result['trace']}\ncase: {result['case']}",
                flush=True,
            )
            print(
                f"again: python -m tests.bytes_fuzz --only {result['target']} --case "
                f"{result['case'] or '00'}",
                flush=True,
            )
        elif case is None:
            print(
                f"{result['target']}: {result['count']} cases, {result['drawn']} drawn, "
                f"{result['seconds']} s",
                flush=True,
            )
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
