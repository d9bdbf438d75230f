"""Contents of the sdist and of its wheel, and that the wheel works without a checkout."""

import configparser
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.tools.support import missing

ROOT = Path(__file__).resolve().parents[1]
# Files and folders that a checkout may have and an sdist must not.
NOT_OF_THE_TREE = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "*.egg-info", "demo-output", "gpu-results", "site"
)

# Benchmark records that are shipped; all others stay in the repository.
RECORDS = (
    "benchmarks/results/scaling-openmpi.json",
    "benchmarks/results/kernels-nvidia-h100-80gb-hbm3.json",
    "benchmarks/results/powersgd-openmpi-2.json",
    "benchmarks/results/powersgd-mpich-2-1gbit.json",
)

pytestmark = pytest.mark.slow


def run(*args: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Return an sdist of the tree, and the wheel built from that sdist.

    The tree is a copy, because an old build/ in the checkout could hide a missing file.
    """
    copy = tmp_path_factory.mktemp("tree") / "mpidist"
    shutil.copytree(ROOT, copy, ignore=NOT_OF_THE_TREE)
    run("-m", "build", "--no-isolation", cwd=copy)
    (sdist,), (wheel,) = (copy / "dist").glob("*.tar.gz"), (copy / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    return built[1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Return a folder with the wheel installed."""
    target = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--no-index", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def test_wheel_holds_every_file_of_the_package(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpidist").rglob("*.py")}
    kernels = {f"mpidist/kernels/cu/{path.name}" for path in (ROOT / "cuda").glob("*.cu*")}
    assert any(name.endswith(".cu") for name in kernels)
    shipped = {
        f"mpidist/shipped_files/{path.relative_to(ROOT).as_posix()}"
        for folder in ("benchmarks", "examples", "slurm")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".sh", ".sbatch", ".def")
    } | {f"mpidist/shipped_files/{name}" for name in RECORDS}
    assert packed == sources | kernels | shipped | {"mpidist/py.typed"}


def test_sdist_holds_what_builds_and_tests(built):
    with tarfile.open(built[0]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("mpidist", "tests", "packaging", "docs")
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    needed = {
        "setup.py",
        "setup.cfg",
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "LICENSE",
        "cuda/pack.cu",
        "slurm/env.sh",
    }
    assert packed >= sources | needed, (sources | needed) - packed
    assert not [name for name in packed if name.endswith(".pyc")]
    assert {name for name in packed if name.startswith("benchmarks/results/")} == set(RECORDS)


def test_an_index_would_take_both(built):
    if importlib.util.find_spec("twine") is None:
        missing("twine is not installed")
    assert (
        run("-m", "twine", "--no-color", "check", "--strict", *built, cwd=built[0].parent).count(
            "PASSED"
        )
        == 2
    )


def test_wheel_registers_with_torch(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(archive.read(name).decode())
    assert dict(entries["torch.backends"]) == {"mpidist": "mpidist.c10d.backend:autoload"}


def test_installed_wheel_finds_kernels_folders_and_torch_the_backend(installed, tmp_path):
    # -I excludes the working folder and PYTHONPATH; the installed wheel is first in sys.path.
    code = f"""
import sys; sys.path.insert(0, {str(installed)!r})
import json
import mpidist
from mpidist import shipped
from mpidist.kernels.load import source
assert source("accumulate.cu").strip()
import torch.distributed
import mpidist.c10d.backend
print(json.dumps({{
    "modules": [mpidist.__file__, mpidist.c10d.backend.__file__],
    "folders": [str(shipped.folder(name)) for name in shipped.FOLDERS],
    "known to torch": "mpidist" in torch.distributed.Backend.backend_list,
}}))
"""
    found = json.loads(run("-I", "-c", code, cwd=tmp_path))
    package = installed / "mpidist"
    assert found == {
        "modules": [str(package / "__init__.py"), str(package / "c10d/backend.py")],
        "folders": [
            str(package / "shipped_files" / name) for name in ("benchmarks", "examples", "slurm")
        ],
        "known to torch": True,
    }
