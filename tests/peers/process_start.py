"""Preparation of a process in which a program of others runs, before the program's first line.

``startup/sitecustomize.py`` calls ``install``, so that the program is started by its own name and
its text stays as it is. The same is done for the run on mpidist and for the peer's; ``SPAWNS`` is
set for ours alone.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from tests.peers.bindings import BINDINGS, bind

# Number of accelerators that the program shall see; its devices are then the host.
DEVICES = "PEERS_DEVICES"
# Processes that the program starts by torch.multiprocessing are calls in the ranks of the job.
SPAWNS = "PEERS_SPAWNS"
# Path to which each process appends the backends of its groups and the modules of its RPC.
RECORD = "PEERS_RECORD"


def install() -> None:
    """Prepare this process as its environment variables say."""
    if RECORD not in os.environ:
        return
    import torch

    _define_torchvisions_operators(torch)
    if (devices := int(os.environ.get(DEVICES, "0"))) > 0:
        from tests.peers import host_devices

        host_devices.install(devices)
    if os.environ.get(SPAWNS):
        from tests.peers import in_rank_spawn

        in_rank_spawn.install()
    _record_groups()
    if listed := os.environ.get(BINDINGS):
        bind(listed)


def _define_torchvisions_operators(torch: Any) -> None:
    # torchvision's wheel of PyPI is built for CUDA. On a CPU build of torch its library cannot be
    # loaded, and its import fails at the operators that it describes without asking for them.
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        scores = "Tensor dets, Tensor scores, float iou_threshold"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", f"({scores}) -> Tensor")


def _record_groups() -> None:
    import torch.distributed as dist
    import torch.distributed.rpc as rpc

    path = os.environ[RECORD]

    def append(line: str) -> None:
        with open(path, "a") as file:
            file.write(f"{line}\n")

    # Where the host stands for accelerators, the peer's groups are those of the host.
    on_host = "MPIDIST_REPLACE" not in os.environ
    start_group = dist.init_process_group

    @functools.wraps(start_group)
    def recorded(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if backend == "nccl" and on_host:
            backend = "gloo"
        start_group(backend, *args, **kwargs)
        append(f"group {dist.get_backend()}")

    for name, module in list(sys.modules.items()):
        # torch.distributed.device_mesh has a reference of its own.
        if name.startswith("torch.") and vars(module).get("init_process_group") is start_group:
            module.init_process_group = recorded  # type: ignore[attr-defined]

    start_rpc = rpc.init_rpc

    @functools.wraps(start_rpc)
    def recorded_rpc(*args: Any, **kwargs: Any) -> None:
        start_rpc(*args, **kwargs)
        append(f"rpc {start_rpc.__module__}")

    rpc.init_rpc = recorded_rpc
