"""Compilation of the CUDA sources for AMD's devices by hipcc; nothing of it runs here."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch

from mpidist.kernels import load
from tests.kernels import host, test_powersgd, test_powersgd_orthogonal
from tests.kernels.conftest import use_cuda_text_on_the_cpu
from tests.kernels.test_compile import FILES, of_rank

pytestmark = pytest.mark.slow

ARCHITECTURE = "gfx90a"  # MI250X: LUMI and Frontier
# hipRTC, which CuPy calls, has the header built in.
HEADER = "#include <hip/hip_runtime.h>\n"


@functools.cache
def assembly_of(text: str, defines: tuple[str, ...]) -> str:
    options = [
        *(f"--offload-arch={ARCHITECTURE}", "--cuda-device-only"),
        *("-std=c++17", "-O3", "-Wall", "-Werror", "-Wno-unused-command-line-argument"),
        *(*(f"-D{define}" for define in defines), "-S", "-o", "-"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "text.hip")  # hipcc goes by the ending
        source.write_text(HEADER + text)
        # With a CUDA toolkit beside it, hipcc would call nvcc.
        return host.compiler_output("hipcc", [*options, str(source)], env={"HIP_PLATFORM": "amd"})


# Of powersgd.cu the lower rank; the higher one, in a type that is converted, in make long.
CASES = [
    *FILES,
    pytest.param("powersgd.cu", of_rank(32, "bfloat16"), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("file", "defines"), CASES, ids=str)
def test_hipcc_compiles_all_kernels_without_warnings(file, defines):
    text = assembly_of(load._text(file), defines)
    compiled = re.findall(r"\.amdhsa_kernel (\w+)", text)
    assert sorted(compiled) == sorted(host.kernel_names(file, tuple(defines)))


def test_whole_vectors_are_stored_at_once():
    """The compiler joins the stores of a struct; a split one takes a store for each element."""
    text = assembly_of(load._text("accumulate.cu"), ())
    body = text.split(".amdhsa_kernel accumulate_float_float")[0].split("accumulate_float_float:")[
        1
    ]
    assert "store_dwordx4" in body


PROBE = """
extern "C" __global__ void probe(float* x, double* y, unsigned short* h, const float* p) {
    x[0] = add_rounded(multiply_rounded(x[1], x[2]), x[3]);
    x[4] = subtract_rounded(multiply_rounded(x[5], x[6]), x[7]);
    y[0] = add_rounded(multiply_rounded(y[1], y[2]), y[3]);
    h[0] = float_to_half(x[10]);
    x[11] = half_to_float(h[1]);
    x[8] = of_lane_xor(x[9], 16) + load_shared_by_blocks(p);
}
"""


def test_products_and_sums_are_rounded_separately():
    """HIP's own __fadd_rn is contracted into a fused multiply-add."""
    text = assembly_of(load.source("common.cuh").replace("#pragma once", "") + PROBE, ())
    body = text.split("\nprobe:")[1].split("s_endpgm")[0]
    assert not re.search(r"v_(fma|mad|fmac)_f(32|64)", body), body
    for wanted in (
        "v_mul_f32",
        "v_sub",
        "v_mul_f64",
        "v_add_f64",
        "v_cvt_f16_f32",
        "v_cvt_f32_f16",
    ):
        assert wanted in body, wanted
    # Read behind the caches that a compute unit has for itself.
    assert re.search(r"(global|flat)_load_dword .*glc", body), body


def test_kernels_on_wavefronts_of_64_lanes(monkeypatch):
    """Warps of 32 lanes are halves of a wavefront, and no half reads lanes of the other."""
    launched = use_cuda_text_on_the_cpu(monkeypatch, ("MPIDIST_WAVE64",))
    cpu = torch.device("cpu")
    test_powersgd.check_stages(
        test_powersgd.bucket_of(test_powersgd.SHAPES, 4, torch.float32, cpu, True), 0.5
    )
    test_powersgd_orthogonal.test_rows_in_registers(cpu, 3, torch.float32)
    assert {"project_float", "backproject_float", "orthogonalize_float"} <= set(launched)
