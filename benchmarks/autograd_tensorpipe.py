"""Workers of torch's RPC over TensorPipe, in processes that exist only while they are measured.

TensorPipe's references work only after the first start in a process, and its threads never sleep.
Therefore worker 0 of mpidist starts new processes in each block, and sleeps until they print their
results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from harness import timing
from rpc import autograd_cases, autograd_stacks

_LIMIT_S = 120.0


def measure(
    workers: int, depths: tuple[int, ...], only: tuple[str, ...], rounds: int, burst_s: float
) -> dict[str, timing.Series]:
    """Start the workers, let the first measure, and return its series by operation.

    Raises:
        RuntimeError: A worker has failed, or ran for more than two minutes; the text includes the
            worker's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps([workers, depths, only, rounds, burst_s, str(Path(folder, "store"))])
        started = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), settings],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(workers)
        ]
        try:
            printed = [one.communicate(timeout=_LIMIT_S) for one in started]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"TensorPipe's workers took longer than {_LIMIT_S:g} s") from None
        finally:
            for one in started:
                if one.poll() is None:
                    one.kill()
                    one.wait()
    for one, (_, errors) in zip(started, printed, strict=True):
        if one.returncode:
            raise RuntimeError(f"a worker of TensorPipe has failed:\n{errors[-3000:]}")
    found = json.loads(printed[0][0].splitlines()[-1])
    return {
        operation: timing.Series(**{**one, "rounds_us": tuple(one["rounds_us"])})
        for operation, one in found.items()
    }


def main() -> None:
    """Run one worker."""
    import torch.distributed.rpc as rpc

    rank = int(sys.argv[1])
    workers, depths, only, rounds, burst_s, store = json.loads(sys.argv[2])
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)
    if rank == 0:
        chosen = [case for case in autograd_cases.cases(depths, workers) if case.operation in only]
        found = autograd_cases.measure(
            [autograd_stacks.stack_of("tensorpipe")], chosen, workers, rounds, burst_s
        )
        print(json.dumps({operation: asdict(one) for operation, (one,) in found.items()}))
    rpc.shutdown()


if __name__ == "__main__":
    main()
