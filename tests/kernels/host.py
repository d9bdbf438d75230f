"""CUDA sources on the CPU: compiled by g++ with a shim, called with NumPy scalars and tensors."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpidist.kernels import load
from mpidist.kernels.launch import THREADS
from tests.tools.support import ROOT, require_tool

_SHIM = Path(__file__).with_name("host_shim.h")
_KEPT = ROOT / ".pytest_cache" / "host_kernels"  # `make clean` removes it


def run(
    file: str,
    name: str,
    blocks: int,
    args: Sequence[Any],
    threads: int = THREADS,
    defines: Sequence[str] = (),
    seed: int = 1,
) -> None:
    """Run a kernel as ``kernels.launch`` does, synchronously on the CPU.

    Args:
        args: Tensors for pointers (None for a null pointer), NumPy scalars of the kernel's types
            for all other arguments.
        seed: Chooses the order in which threads run; 0 for their natural order.
    """
    held = [ctypes.c_void_p(_address(arg)) if _is_pointer(arg) else np.asarray(arg) for arg in args]
    places = [
        ctypes.addressof(value) if isinstance(value, ctypes.c_void_p) else value.ctypes.data
        for value in held
    ]
    launcher = getattr(_library(file, tuple(defines)), f"launch_{name}")
    launcher(
        ctypes.c_uint(blocks),
        ctypes.c_uint(threads),
        ctypes.c_uint(seed),
        (ctypes.c_void_p * len(places))(*places),
    )


def _is_pointer(arg: Any) -> bool:
    return arg is None or isinstance(arg, (torch.Tensor, int))


def _address(arg: torch.Tensor | int | None) -> int:
    return arg.data_ptr() if isinstance(arg, torch.Tensor) else arg or 0


@functools.cache
def _library(file: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    expanded = _expanded(file, defines)
    names = kernel_names(file, defines)
    text = "\n".join(
        [f'#include "{_SHIM}"', f'#include "{load.folder() / file}"', *map(_launcher, names)]
    )
    # Ranks, workers and later runs load the first compiled library. One process compiles, the
    # others wait for it: of four ranks on two cores each would take twice as long.
    common = (load.folder() / "common.cuh").read_text()
    parts = (require_tool("g++"), *_options(defines), text, expanded, common, _SHIM.read_text())
    kept = _KEPT / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.so"
    is_ours = not Path(file).is_absolute()  # else a test has written the file
    if is_ours and kept.exists():
        return ctypes.CDLL(str(kept))
    _KEPT.mkdir(parents=True, exist_ok=True)
    with (
        kept.with_suffix(".lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=_KEPT) as folder,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ours and kept.exists():
            return ctypes.CDLL(str(kept))
        source, library = Path(folder, "host.cpp"), Path(folder, "host.so")
        source.write_text(text)
        options = [*_options(defines), "-shared", "-fPIC", "-o", str(library), str(source)]
        compiler_output("g++", options)
        loaded = ctypes.CDLL(str(library))
        if is_ours:
            os.replace(library, kept)
        return loaded


def kernel_names(file: str, defines: Sequence[str]) -> list[str]:
    """Return the names of a source's kernels."""
    expanded = _expanded(file, defines)
    return re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", expanded)


def _launcher(name: str) -> str:
    head = (
        f'extern "C" __attribute__((visibility("default"))) void launch_{name}(unsigned b, '
        "unsigned t, unsigned s, void** a)"
    )
    return f"{head} {{ shim::Launcher<{name}>::launch(b, t, s, a); }}"


def _options(defines: Sequence[str]) -> list[str]:
    # Misaligned vectors trap, as on the device; products and sums are not fused.
    checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-ffp-contract=off"]
    # Libraries compiled for different values of RANK have variables of the same names and different
    # sizes.
    own = ["-fno-gnu-unique", "-fvisibility=hidden"]
    return [
        "-std=c++17",
        "-O1",
        "-Wno-unknown-pragmas",
        *checks,
        *own,
        *(f"-D{define}" for define in defines),
    ]


@functools.cache
def _expanded(file: str, defines: Sequence[str]) -> str:
    # Macros define the entry points.
    text = (load.folder() / file).read_text().replace('#include "common.cuh"', "")
    options = ["-E", "-P", "-x", "c++", *(f"-D{define}" for define in defines), "-"]
    return re.sub(r"\s+", " ", compiler_output("g++", options, text))


def compiler_output(
    compiler: str,
    options: Sequence[str],
    text: str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a compiler that must succeed; return what it prints.

    Args:
        compiler: Name of the program; without it the test is skipped.
        options: Its arguments.
        text: Its standard input.
        env: Variables beyond this process's.
    """
    done = subprocess.run(
        [require_tool(compiler), *options],
        input=text,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
