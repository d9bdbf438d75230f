"""The device that a benchmark measures: chosen, described, named in files, and its clock.

Two clocks tell a GPU's times, both by events. ``as_issued`` runs a burst on an idle device, so what
the host takes to start the work counts. ``HeadStart`` gives the host time, so that the device never
waits for it: the work's own time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import distributions
from typing import Any

import torch
from timing import Contender, RunBurst

from mpidist import comm

# cycles: half a millisecond, and an eighth of a second
_SHORTEST_NAP, _LONGEST_NAP = 1 << 20, 1 << 28


def chosen(name: str) -> torch.device:
    """Return the CPU, or this rank's GPU with CUDA started on it: MPI starts afterwards, and finds the context it needs."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device")
    device = comm.device()
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    # What is compared must be the arithmetic that was asked for, the same each time.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """Describe a GPU and what drives it."""
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
    """Return the device's name as it appears in file names: ``nvidia-h200``, ``cpu``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def synchronize(device: torch.device) -> None:
    """Wait for all that the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_issued(device: torch.device) -> RunBurst | None:
    """Return the clock that counts the host's part; None, the host's own, for the CPU."""
    if device.type != "cuda":
        return None

    def run(comm: Any, contender: Contender, passes: int) -> float:
        comm.Barrier()
        torch.cuda.synchronize(device)
        return _between_events(contender, passes)[0]

    return run


class HeadStart:
    """The clock that counts a GPU's part alone.

    Attributes:
        behind: Names of contenders whose host's part counts still: they wait for the device, or
            fill its queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._naps: dict[str, int] = {}  # cycles, by contender
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
    """Return the seconds from the first call's beginning to the last one's end, and whether all were issued before it began."""
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
