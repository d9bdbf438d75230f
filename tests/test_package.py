"""The wheel: what is in it, and that it works where no checkout is near."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INPUTS = ["setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "mpidist", "cuda", "benchmarks", "examples", "slurm"]

pytestmark = pytest.mark.slow


def run(*args: str | Path, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the tree, built from a copy: an old build/ in the checkout could hide a missing file."""
    copy = tmp_path_factory.mktemp("tree")
    for name in INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", copy / "dist", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel installed into it."""
    target = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--no-index", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def run_installed(installed: Path, code: str, cwd: Path) -> list[str]:
    """Run code that sees the installed wheel first; -I keeps the working folder and PYTHONPATH out."""
    return run("-I", "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}", cwd=cwd).split("\n")


def test_wheel_holds_every_file_of_the_package(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpidist").rglob("*.py")}
    kernels = {f"mpidist/kernels/cu/{path.name}" for path in (ROOT / "cuda").glob("*.cu*")}
    assert any(name.endswith(".cu") for name in kernels)
    shipped = {
        f"mpidist/shipped_files/{folder}/{path.name}"
        for folder in ("benchmarks", "examples", "slurm")
        for path in (ROOT / folder).iterdir()
        if path.suffix in (".py", ".md", ".sh", ".sbatch")
    }
    assert packed == sources | kernels | shipped | {"mpidist/py.typed"}


def test_wheel_registers_with_torch(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(archive.read(name).decode())
    assert dict(entries["torch.backends"]) == {"mpidist": "mpidist.torch_backend:autoload"}


def test_installed_wheel_finds_its_kernels(installed, tmp_path):
    code = """
import mpidist
from mpidist.kernels.load import source
assert source("accumulate.cu").strip()
print(mpidist.__file__)
"""
    where = Path(run_installed(installed, code, tmp_path)[0])
    assert where == installed / "mpidist" / "__init__.py"


def test_installed_wheel_finds_the_folders_beside_it(installed, tmp_path):
    code = """
from mpidist import shipped
for name in shipped.FOLDERS:
    print(shipped.folder(name))
"""
    places = run_installed(installed, code, tmp_path)[:3]
    assert places == [str(installed / "mpidist" / "shipped_files" / name) for name in ("benchmarks", "examples", "slurm")]


def test_installed_wheel_lets_torch_find_the_backend(installed, tmp_path):
    code = """
import torch.distributed
import mpidist.torch_backend
print("mpidist" in torch.distributed.Backend.backend_list)
print(mpidist.torch_backend.__file__)
"""
    known, where = run_installed(installed, code, tmp_path)[:2]
    assert known == "True"
    assert Path(where) == installed / "mpidist" / "torch_backend.py"
