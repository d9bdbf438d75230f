"""Requirements of ``make gpu``: one line for each missing module, ``name<TAB>how to install it``.

Commands::

    python tests/gpu/needs.py cuda            check; with cpu neither CuPy nor a GPU is needed
    python tests/gpu/needs.py unpack FROM TO  unpack what is missing or too old from wheels and
                                              archives in a folder; without pip and without network
    python tests/gpu/needs.py metadata TO     entry points of mpidist, unless it is installed
    python tests/gpu/needs.py wheels          distributions that a machine with torch and CuPy
                                              lacks, for pip download --no-deps
    python tests/gpu/needs.py weigh FOLDER    size of its wheels; status 1 above the limit
"""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import os
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Modules that tests and benchmarks import, each of a distribution of the same name, with their
# dependencies.
MODULES = {
    **dict.fromkeys(("mpi4py", "msgspec", "expecttest", "psutil", "cloudpickle"), ()),
    "rich": ("markdown-it-py", "mdurl", "pygments"),
    "pytest": ("pluggy", "iniconfig", "pygments", "packaging"),
    "hypothesis": ("sortedcontainers",),
}
# An older mpi4py ignores MPI4PY_LIBMPI, and calls the MPI for which the machine's image built it.
LEAST = {"mpi4py": (4, 1)}
# They are sent along with each call to a borrowed machine.
MOST_MIB = 24


def missing(device: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each missing module, and how to install it.

    Args:
        device: "cuda" or "cpu".
    """
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            yield name, f"pip install {name}"
        elif _is_too_old(name):
            least = ".".join(map(str, LEAST[name]))
            yield (
                name,
                f"pip install '{name}>={least}' (there is {importlib.metadata.version(name)})",
            )
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
    except Exception as error:  # a read-only folder, a missing library
        major = torch.version.cuda.split(".")[0]
        yield (
            "cupy",
            f"pip install cupy-cuda{major}x ({type(error).__name__}: {error})".replace("\n", " "),
        )


def unpack(source: Path, target: Path) -> None:
    """Unpack missing wheels into ``target/site``, and all archives into ``target``.

    A wheel takes the place of an installed version that is too old, if ``target/site`` comes first
    in the interpreter's path.
    ``pip install --target`` loses the files that the wheel of an MPI has beside its modules (bin,
    lib).
    """
    for path in sorted(source.rglob("*.whl")):
        name, _, python = path.stem.split("-")[:3]
        fits = (
            not python.startswith("cp")
            or "abi3" in path.stem
            or python == f"cp{sys.version_info[0]}{sys.version_info[1]}"
        )
        if fits and (not _is_installed(name) or _is_too_old(name)):
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


def _is_too_old(name: str) -> bool:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST.get(name, ())


def _unpack_wheel(path: Path, target: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        for info in wheel.infolist():
            if info.is_dir():
                continue
            # NAME.data/data/bin/mpirun goes to TARGET/NAME/bin/mpirun; modules go to TARGET/site,
            # wherever they are in the wheel.
            data = re.match(r"([^/-]+)-[^/]+\.data/(\w+)/(.+)", info.filename)
            if data is None or data[2] in ("purelib", "platlib"):
                place = target / "site" / (info.filename if data is None else data[3])
            else:
                place = target / data[1] / data[3]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(wheel.read(info))
            if info.external_attr >> 16 & 0o100:
                place.chmod(0o755)


def write_metadata(folder: Path) -> None:
    """Write mpidist's entry points, by which torch finds the backend, unless it is installed."""
    if "mpidist" in importlib.metadata.entry_points(group="torch.backends").names:
        return
    settings = configparser.ConfigParser()
    settings.read("setup.cfg")
    own = folder / "mpidist-0.dist-info"
    own.mkdir(parents=True, exist_ok=True)
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: mpidist\nVersion: 0\n")
    groups = settings["options.entry_points"].items()
    (own / "entry_points.txt").write_text(
        "".join(f"[{name}]\n{lines.strip()}\n" for name, lines in groups)
    )


def weight_mib(folder: Path) -> float:
    """Return the size of a folder's wheels."""
    return sum(path.stat().st_size for path in folder.rglob("*.whl")) / 2**20


def main(arguments: list[str]) -> None:
    if arguments[0] == "unpack":
        unpack(Path(arguments[1]), Path(arguments[2]))
    elif arguments[0] == "metadata":
        write_metadata(Path(arguments[1]))
    elif arguments[0] == "weigh":
        weight = weight_mib(Path(arguments[1]))
        print(f"{arguments[1]}: {weight:.1f} MiB, of at most {MOST_MIB}")
        if weight > MOST_MIB:
            sys.exit(1)
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
    # The folder of this file is first in sys.path, and its modules must not hide others.
    sys.path[0] = os.getcwd()
    main(sys.argv[1:])
