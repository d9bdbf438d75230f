"""Plot records again, in a light and a dark picture each.

python benchmarks/plots.py [RECORD.json …]; without records, all of results/ that have a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness import benchmark_options, plots


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="*", metavar="RECORD.json")
    for path in parser.parse_args(words).records or plots.plotted(benchmark_options.RESULTS):
        print(plots.beside(path))


if __name__ == "__main__":
    main()
