"""List the packages: those of the tree and, as one more, the CUDA text in cuda/. All else is in setup.cfg."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mpidist", "mpidist.*"]), "mpidist.kernels.cu"])
