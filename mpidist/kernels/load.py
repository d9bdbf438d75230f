"""CUDA sources, compiled by CuPy once per device and source."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mpidist.errors import KernelError

_PACKAGED = Path(__file__).resolve().parent / "cu"  # in a wheel
_CHECKOUT = Path(__file__).resolve().parents[2] / "cuda"  # in a checkout or an editable install


def folder() -> Path:
    """Return the folder that holds the ``.cu`` and ``.cuh`` files.

    Raises:
        KernelError: Neither place has them; the installation is broken.
    """
    for place in (_PACKAGED, _CHECKOUT):
        if (place / "common.cuh").is_file():
            return place
    raise KernelError(f"no CUDA sources in {_PACKAGED} or {_CHECKOUT}; install mpidist again")


def source(name: str) -> str:
    """Return the content of ``name`` (for example ``"accumulate.cu"``).

    Raises:
        KernelError: There is no such file.
    """
    path = folder() / name
    if not path.is_file():
        raise KernelError(f"no CUDA source {name!r} in {folder()}")
    return path.read_text(encoding="utf-8")


@contextlib.contextmanager
def current_device(index: int) -> Iterator[None]:
    """Make a CUDA device current for torch and CuPy."""
    import cupy

    # torch first: at its end it restores the previous device only if that device has a context.
    # CuPy alone would restore it always, and so create a context there.
    with torch.cuda.device(index), cupy.cuda.Device(index):
        yield


@functools.cache
def is_available(device: int) -> bool:
    """Return whether kernels can be launched; if CuPy cannot compile for the device, warn once.

    Args:
        device: The CUDA device's index; no context is created on another device.
    """
    try:
        import cupy

        with current_device(device):
            cupy.RawModule(code='extern "C" __global__ void nothing() {}').compile()
    # no driver, no compiler, no cache folder: torch's twin is used
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return False
        warnings.warn(
            "CuPy cannot be used, so torch's operations take the place of mpidist's kernels: "
            f"{error}",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def function(
    file: str, name: str, device: int, defines: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Return a compiled kernel.

    CuPy caches the machine code on disk by the digest of the source and the options.

    Args:
        file: The ``.cu`` file.
        name: An ``extern "C"`` entry point in it.
        device: The CUDA device's index.
        defines: Macros, as ``"NAME=value"``.

    Raises:
        KernelError: It does not compile; the text has file, line and the compiler's message.
    """
    return _module(file, device, defines).get_function(name)


@functools.cache
def _module(file: str, device: int, defines: tuple[str, ...]) -> Any:
    import cupy

    options = ("--std=c++17", *(f"-D{define}" for define in defines))
    try:
        with current_device(device):
            module = cupy.RawModule(code=_text(file), options=options)
            module.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"{file} does not compile:\n{error}") from error
    return module


def _text(file: str) -> str:
    # Includes are expanded here, because the digest of CuPy's cache does not cover included files;
    # #line lets the compiler report the original files.
    header = f'#line 1 "{folder() / "common.cuh"}"\n{source("common.cuh")}'.replace(
        "#pragma once", ""
    )
    body = source(file).replace('#include "common.cuh"', "")
    return f'{header}\n#line 1 "{folder() / file}"\n{body}'
