"""The CUDA text against the compilers: NVRTC, which CuPy uses, from its wheel, and nvcc where it is."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.errors import KernelError
from mpidist.kernels import load
from tests.support import missing

FILES = [("accumulate.cu", ()), ("pack.cu", ()), ("powersgd.cu", ("RANK=4",))]
CASES = [(file, defines, architecture) for file, defines in FILES for architecture in ("sm_80", "sm_90")]
CASES += [("powersgd.cu", (f"RANK={rank}",), "sm_90") for rank in (1, 32)]


def test_every_file_is_compiled():
    assert {file for file, *_ in CASES} == {path.name for path in load.folder().glob("*.cu")}


@pytest.mark.parametrize(("file", "defines", "architecture"), CASES, ids=str)
def test_nvrtc(file, defines, architecture):
    log, code = compiled_by_nvrtc(load._text(file), [f"--gpu-architecture={architecture}", *(f"-D{d}" for d in defines)])
    assert code[:4] == b"\x7fELF", log
    assert "warning" not in log, log


def test_a_mistake_is_told_with_its_file_and_line():
    log, code = compiled_by_nvrtc(load._text("pack.cu").replace("Part part =", "Part part +"), ["--gpu-architecture=sm_90"])
    lines = load.source("pack.cu").split("\n")
    line = next(number for number, text in enumerate(lines, 1) if "Part part =" in text)
    assert not code and f"{load.folder() / 'pack.cu'}({line})" in log


# One architecture: NVRTC has seen the other, and this is the compiler of which a user reads the messages.
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed; NVRTC has compiled the same text")
@pytest.mark.parametrize(("file", "defines"), FILES, ids=str)
def test_nvcc(file, defines, tmp_path):
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", "-cubin", "-o", str(tmp_path / "out")]
    command += [*(f"-D{define}" for define in defines), str(load.folder() / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_source_is_named():
    with pytest.raises(KernelError, match=r"nothing\.cu"):
        load.source("nothing.cu")


def compiled_by_nvrtc(text: str, options: list[str]) -> tuple[str, bytes]:
    """Return the compiler's messages and the machine code."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"text.cu", 0, None, None) == 0
    given = [option.encode() for option in ["--std=c++17", *options]]
    status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    code = b""
    if status == 0:
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        space = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetCUBIN(program, space) == 0
        code = space.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), code


def _nvrtc() -> ctypes.CDLL:
    for folder in sys.path:
        for path in sorted(Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    missing("NVRTC (the wheel nvidia-cuda-nvrtc) is not installed")
    raise AssertionError
