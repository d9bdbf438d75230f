"""Device of a benchmark: selection, description, file name, and clocks.

Two clocks measure a GPU by events. ``as_issued`` runs a burst on an idle device, so that the host's
time to issue the work counts. ``HeadStart`` lets the host run ahead, so that the device never waits
for the host: the device's own time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import distributions
from typing import Any

import torch

from harness.timing import Contender, RunBurst
from mpidist import comm

# In cycles: half a millisecond, and an eighth of a second.
_SHORTEST_NAP, _LONGEST_NAP = 1 << 20, 1 << 28


def chosen(name: str) -> torch.device:
    """Return the CPU, or this rank's GPU with a CUDA context, which MPI needs when MPI starts."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device")
    device = comm.device()
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    # All contenders must use the same, deterministic arithmetic.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """Describe a GPU, its driver and its libraries."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "count": torch.cuda.device_count(),
        "driver": _driver(),
        "cuda_of_torch": torch.version.cuda,
        "cupy": next(
            (f"{d.name} {d.version}" for d in distributions() if (d.name or "").startswith("cupy")),
            None,
        ),
    }


def name_of(device: torch.device) -> str:
    """Return the device's name for file names: ``nvidia-h200``, ``cpu``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def synchronize(device: torch.device) -> None:
    """Wait for all work that was issued to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def awaited(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return the call; on a GPU, a call that waits for the device's work."""
    if device.type == "cpu":
        return call

    def run() -> None:
        call()
        synchronize(device)

    return run


def as_issued(device: torch.device) -> RunBurst | None:
    """Return the clock that includes the host's time; for the CPU None, the host's clock."""
    if device.type != "cuda":
        return None

    def run(comm: Any, contender: Contender, passes: int) -> float:
        comm.Barrier()
        torch.cuda.synchronize(device)
        return _between_events(contender, passes)[0]

    return run


class HeadStart:
    """Clock of a GPU's own time.

    Attributes:
        behind: Names of contenders whose figures include host time, because they wait for the
            device or fill the device's queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._naps: dict[str, int] = {}  # cycles per contender
        self.behind: set[str] = set()

    def __call__(self, comm: Any, contender: Contender, passes: int) -> float:
        name = contender.name
        while True:
            nap = self._naps.setdefault(name, _SHORTEST_NAP)
            torch.cuda.synchronize(self._device)
            torch.cuda._sleep(nap)
            elapsed_s, was_ahead = _between_events(contender, passes)
            if was_ahead or name in self.behind:
                return elapsed_s
            if nap >= _LONGEST_NAP:
                self.behind.add(name)
                self._naps[name] = _SHORTEST_NAP
            else:
                self._naps[name] = 2 * nap


def _between_events(contender: Contender, passes: int) -> tuple[float, bool]:
    """Return the seconds between events around the calls, and whether the host stayed ahead."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(passes):
        for call in contender.calls:
            call()
    was_ahead = not first.query()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3, was_ahead


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout.split() or ["unknown"])[0]
