"""Compilation of the CUDA sources by NVRTC, which CuPy uses, and by nvcc if it is installed."""

import ctypes
import functools
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.errors import KernelError
from mpidist.kernels import launch, load, powersgd_plan
from tests.tools.support import missing

# Options that CuPy adds (14.2, 13 and 12 alike; cupy/cuda/compiler.py).
CUPY = ("-ftz=true", "--device-as-default-execution-space")


def of_rank(rank, element):
    return (f"RANK={rank}", f"ELEMENT={element}")


FILES = [
    ("accumulate.cu", ()),
    ("pack.cu", ()),
    ("powersgd.cu", of_rank(4, "float")),
]
# A compilation takes seconds, so types are selected: half types differ from float in loads and
# stores; fp64 needs the most registers, and so does the highest rank.
CASES = [
    *((*file, "sm_90") for file in FILES),
    *(("powersgd.cu", of_rank(*case), "sm_90") for case in ((4, "float16"), (32, "double"))),
]
# The texts do not depend on the architecture; types at other ranks than above.
LONG_CASES = [
    *((*file, "sm_80") for file in FILES),
    *(
        ("powersgd.cu", of_rank(*case), "sm_90")
        for case in ((1, "float"), (4, "bfloat16"), (4, "double"), (32, "float16"))
    ),
]


def test_every_file_is_compiled():
    assert {file for file, *_ in CASES} == {path.name for path in load.folder().glob("*.cu")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "defines", "architecture"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)],
    ids=str,
)
def test_nvrtc_compiles_kernels_that_fit_in_registers(file, defines, architecture):
    """Kernels compile without messages, fit in registers and use no local memory.

    The registers of a multiprocessor suffice for a block of the size that is launched. Local memory
    would mean that registers are indexed at run time.
    """
    log, code = compiled_by_nvrtc(
        load._text(file), [f"--gpu-architecture={architecture}", *(f"-D{d}" for d in defines)]
    )
    assert code[:4] == b"\x7fELF", log
    assert "warning" not in log, log
    found = attributes(code, REGISTERS)
    assert found
    for name, count in found.items():
        is_sweep = name.startswith(("orthogonalize", "normalize"))
        threads = powersgd_plan.SWEEP_THREADS if is_sweep else launch.THREADS
        assert -(-count // 8) * 8 * threads <= 65536, (
            f"{name}: {count} registers in {threads} threads"
        )
    assert not any(attributes(code, FRAME_BYTES).values()), attributes(code, FRAME_BYTES)


def test_a_compilers_error_names_file_and_line():
    log, code = compiled_by_nvrtc(
        load._text("pack.cu").replace("Part part =", "Part part +"), ["--gpu-architecture=sm_90"]
    )
    lines = load.source("pack.cu").split("\n")
    line = next(number for number, text in enumerate(lines, 1) if "Part part =" in text)
    assert not code and f"{load.folder() / 'pack.cu'}({line})" in log


# To PTX of one architecture, because NVRTC has made machine code of it, and of the others; users
# read nvcc's messages.
@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not installed; NVRTC has compiled the same text"
)
@pytest.mark.slow
@pytest.mark.parametrize(("file", "defines"), FILES, ids=str)
def test_nvcc_compiles_without_warnings(file, defines, tmp_path):
    command = [
        "nvcc",
        "-arch=sm_90",
        "-std=c++17",
        "-Werror",
        "all-warnings",
        "-ptx",
        "-o",
        str(tmp_path / "out"),
    ]
    command += [*(f"-D{define}" for define in defines), str(load.folder() / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def ptx_of(file, defines=()):
    """Return the PTX of each kernel of a file, by name."""
    log, code = compiled_by_nvrtc(
        load._text(file), ["--gpu-architecture=compute_90", *(f"-D{d}" for d in defines)]
    )
    assert code, log
    parts = re.split(r"\.entry (\w+)\(", code.decode())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_whole_vectors_are_stored_at_once():
    """A vector that is split takes one store for each element, at two to four times the time."""
    kernels = ptx_of("pack.cu") | ptx_of("accumulate.cu")
    assert len(kernels) == 32
    for name, text in kernels.items():
        if "byte_byte" in name:
            continue
        source, target = name.split("_")[1:]
        if name.startswith("unpack") or name.startswith("accumulate"):
            source, target = target, source
        bytes_at_once = 16 * WIDTHS[target] // max(WIDTHS[source], WIDTHS[target])
        wanted = {16: "st.v4.b32", 8: "st.v2.b32"}[bytes_at_once]
        assert text.count(wanted) >= 4, (name, wanted)


WIDTHS = {"float": 4, "float16": 2, "bfloat16": 2, "double": 8}


def test_what_must_be_exact_keeps_subnormals():
    """CuPy's options flush subnormals in every fp32 operation without an explicit modifier."""
    kernels = ptx_of("pack.cu") | ptx_of("accumulate.cu")
    for name, text in kernels.items():
        assert not re.search(r"\b(add|mul|sub|div|fma|neg|abs)\S*\.ftz", text), name


@pytest.mark.slow
def test_powersgd_reads_and_writes_what_it_must_once():
    """Count the loads and stores of each width.

    A warp's loop accesses four rows, and Q at rank 4; backproject also reads rows of P.
    """
    kernels = ptx_of("powersgd.cu", of_rank(4, "float")) | ptx_of(
        "powersgd.cu", of_rank(4, "bfloat16")
    )

    def count(name, pattern):
        return len(re.findall(rf"\b{pattern}\b", kernels[name]))

    for width in (4, 2):
        # Of uncompressed tensors, for each of two alignments of their sources.
        whole = 4 if width == 4 else 0
        loads, stores = rf"ld\.v{width}\.[fu]32", rf"st\.v{width}\.b32"
        assert count("project_float", loads) == 4 + 4 + 4 + whole, "M, E and Q"
        assert count("project_float", stores) == 4 + 2 * whole, "M"
        assert count("reconstruct_float", loads) == 4 + 4 + whole, "M and Q"
        assert count("reconstruct_float", stores) == 4 + 4 + 2 * whole, "M and E"
        assert count("backproject_float", loads) == 4 * (4 // width), "M"
    # Four rows of P in flight, for each width: 16 bytes, 8 bytes and one element; for four bfloat16
    # 8 bytes are the maximum.
    assert count("backproject_float", r"ld\.shared\.v4\.f32") == 3 * 4
    assert count("backproject_bfloat16", r"ld\.shared\.v4\.f32") == 2 * 4
    # 16 rows of 4 columns are read and written once; the remaining accesses are for matrices in
    # memory.
    assert 64 <= count("orthogonalize_float", r"st\.f32") < 2 * 64
    assert not any(re.search(r"\.local\b", text) for text in kernels.values())


def test_an_unknown_source_is_named():
    with pytest.raises(KernelError, match=r"nothing\.cu"):
        load.source("nothing.cu")


def compiled_by_nvrtc(text: str, options: list[str]) -> tuple[str, bytes]:
    """Return the compiler's messages and the machine code, or PTX for ``compute_…``."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert (
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"text.cu", 0, None, None)
        == 0
    )
    given = [option.encode() for option in ["--std=c++17", *options, *CUPY]]
    status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    code = b""
    if status == 0:
        kind = "PTX" if any("compute_" in option for option in options) else "CUBIN"
        assert getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
        space = ctypes.create_string_buffer(size.value)
        assert getattr(nvrtc, f"nvrtcGet{kind}")(program, space) == 0
        code = space.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), code


REGISTERS, FRAME_BYTES = 0x2F, 0x11  # of a thread: EIATTR_REGCOUNT, EIATTR_FRAME_SIZE


def attributes(cubin: bytes, wanted: int) -> dict[str, int]:
    """Return one attribute of each kernel from the ELF file of the machine code."""
    start, (size, count) = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        struct.unpack_from("<HH", cubin, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQII", cubin, start + i * size) for i in range(count)]
    names = sections[struct.unpack_from("<H", cubin, 0x3E)[0]]

    def text(table: int, place: int) -> str:
        return cubin[table + place : cubin.index(b"\0", table + place)].decode()

    symbols = next(section for section in sections if section[1] == 2)
    words = sections[symbols[6]]
    info = next(section for section in sections if text(names[4], section[0]) == ".nv.info")
    found, at = {}, info[4]
    while at < info[4] + info[5]:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if (form, attribute, length) == (4, wanted, 8):
            symbol, number = struct.unpack_from("<II", cubin, at + 4)
            found[text(words[4], struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)[0])] = (
                number
            )
        at += 4 + (length if form == 4 else 0)
    return found


def _nvrtc() -> ctypes.CDLL:
    for folder in sys.path:
        for path in sorted(Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    missing("NVRTC (the wheel nvidia-cuda-nvrtc) is not installed")
    raise AssertionError
