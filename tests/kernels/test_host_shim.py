"""CPU shim for CUDA sources: it must report errors that a GPU would not tolerate."""

import itertools
import textwrap

import numpy as np
import pytest
import torch

from tests.kernels import host
from tests.tools.support import python, started

SUM = """
extern "C" __global__ void block_sum(const int* x, int* out, int n) {
    __shared__ int held[256];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    held[threadIdx.x] = i < n ? x[i] : 0;
    BARRIER
    int total = 0;
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < blockDim.x; i++) total += held[i];
        out[blockIdx.x] = total;
    }
}
"""


def test_barriers_wait_for_all(tmp_path):
    file = tmp_path / "sum.cu"
    file.write_text(SUM.replace("BARRIER", "__syncthreads();"))
    x = torch.arange(1000, dtype=torch.int32)
    for seed, threads in itertools.product(range(5), [1, 33, 256]):
        blocks, out = -(-1000 // threads), torch.zeros(1000, dtype=torch.int32)
        host.run(str(file), "block_sum", blocks, [x, out, np.int32(1000)], threads, seed=seed)
        wanted = [part.sum() for part in x.split(threads)]
        assert out[:blocks].tolist() == wanted, f"seed {seed}, {threads} threads"


def test_a_missing_barrier_gives_wrong_sums(tmp_path):
    file = tmp_path / "sum.cu"
    file.write_text(SUM.replace("BARRIER", ""))
    x, out = torch.ones(256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    host.run(str(file), "block_sum", 1, [x, out, np.int32(256)], 256, seed=0)
    assert out.item() != 256


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "if (threadIdx.x < 5) __shfl_xor_sync(~0u, 1, 1); else __syncthreads();",
            "wait for each other in vain",
        ),
        ("*(Pair*)((char*)out + 4) = Pair{1, 2};", ""),
    ],
    ids=["barriers that do not meet", "a misaligned vector"],
)
def test_what_would_hang_or_fault_ends_the_process(tmp_path, body, words):
    file = tmp_path / "bad.cu"
    pair = "struct alignas(8) Pair { int a, b; };"
    file.write_text(f'{pair}\nextern "C" __global__ void bad(int* out) {{ {body} }}\n')
    script = f"""
        import torch
        from tests.kernels import host
        host.run({str(file)!r}, "bad", 1, [torch.zeros(8, dtype=torch.int32)], 32)
    """
    done = started([*python(), "-c", textwrap.dedent(script)], 100)
    assert done.returncode < 0 and words in done.stderr
