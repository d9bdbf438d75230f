"""Spack recipe (repository API 2): `packages/py_mpidist/package.py` of a package repository."""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpidist(PythonPackage):
    """Distributed PyTorch over a cluster's MPI: collectives, DDP, RPC, autograd, OSS."""

    pypi = "mpidist/mpidist-0.2.0.tar.gz"

    license("BSD-3-Clause")

    # Spack needs the digest of an sdist only for a download; from a checkout use spack develop.
    version("0.2.0")

    variant(
        "cuda",
        default=False,
        description="Compile and launch the kernels on Nvidia GPUs, through CuPy",
    )
    variant(
        "cli", default=True, description="The mpidist command: doctor, run, bench, tune, submit"
    )

    depends_on("python@3.10:3.13", type=("build", "run"))
    # The license is an SPDX expression.
    depends_on("py-setuptools@77:", type="build")

    depends_on("mpi", type="run")
    depends_on("py-mpi4py@4.1:", type="run")
    depends_on("py-msgspec@0.20:", type="run")
    depends_on("py-numpy", type="run")
    # torch.distributed needs +distributed, but not its MPI backend.
    depends_on("py-torch@2.11: +distributed", type="run")

    with when("+cuda"):
        depends_on("py-torch +cuda", type="run")
        depends_on("py-cupy", type="run")

    with when("+cli"):
        depends_on("py-typer@0.12:", type="run")
        depends_on("py-rich", type="run")

    # These imports start neither MPI nor CUDA, so that the check passes on a login node.
    import_modules = [
        "mpidist",
        "mpidist.autograd",
        "mpidist.comm",
        "mpidist.ddp",
        "mpidist.kernels",
        "mpidist.nn",
        "mpidist.optim",
        "mpidist.rpc",
        "mpidist.c10d.backend",
        "mpidist.zero",
    ]
