"""List the packages: those of the tree and, as more of them, folders beside it.

All else is in setup.cfg.
"""

from setuptools import find_packages, setup

BESIDE = ["kernels.cu", "shipped_files.benchmarks", "shipped_files.examples", "shipped_files.slurm"]

setup(
    packages=[
        *find_packages(include=["mpidist", "mpidist.*"]),
        *(f"mpidist.{name}" for name in BESIDE),
        *(f"mpidist.shipped_files.benchmarks.{name}" for name in find_packages("benchmarks")),
    ]
)
