"""SimGrid's replayer: start of ``smpirun -replay``, simulated seconds.

SMPI's own factors of bandwidth and latency are those of one cluster's Gigabit Ethernet with TCP.
They are set to 1, TCP's window and its acknowledgements are left out: a cable carries its rate, a
route takes its latency, and each message costs its sender and its receiver ``overhead_s``. What a
real network does otherwise is for the calibration (``calibration``).

Source: Casanova, Giersch, Legrand, Quinson and Suter, "Versatile, Scalable, and Accurate Simulation
of Distributed Applications and Platforms" (2014); Degomme et al., "Simulating MPI Applications: The
SMPI Approach" (2017).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay import networks
from replay.networks import Network

MISSING = "SimGrid's smpirun is not found: apt-get install libsimgrid-dev (Debian), or simgrid.org/"
_TIME = re.compile(r"Simulation time (\d+(?:\.\d+)?(?:e[-+]?\d+)?)")


@dataclass(frozen=True)
class Messages:
    """Costs of a message beside the network.

    Attributes:
        overhead_s: Processor time of the sender, and of the receiver.
        eager_bytes: Messages from this length on wait for their receive.
        library: Of the simulator's own collectives: ``mpich`` or ``ompi``.
    """

    overhead_s: float = 1e-6
    eager_bytes: int = 65536
    library: str = "mpich"


def installed() -> str | None:
    """Return the path of ``smpirun``; None without SimGrid."""
    return shutil.which("smpirun")


def version() -> str:
    """Return SimGrid's version.

    Raises:
        SystemExit: It is not installed.
    """
    found = installed()
    if found is None:
        raise SystemExit(MISSING)
    done = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=30)
    matched = re.search(r"\d+\.\d+[.\d]*", done.stdout + done.stderr)
    return matched[0] if matched else "unknown"


def simulated_s(
    network: Network,
    ranks: int,
    processes: Iterable[Iterator[str]],
    messages: Messages = Messages(),
    limit_s: float = 300.0,
) -> float:
    """Replay a trace; return the simulated seconds to the end of the last process.

    Args:
        network: Process r of the trace is on node r modulo W: the first nodes, or all of fewer.
        ranks: W.
        processes: The lines of each.
        messages: Costs of a message.
        limit_s: Limit of the replayer's own time.

    Raises:
        RuntimeError: The replay has failed or not ended within the limit.
        SystemExit: SimGrid is not installed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = []
        for process, lines in enumerate(processes):
            path = folder / f"{process}.txt"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            written.append(str(path))
        (folder / "traces").write_text("\n".join(written) + "\n", encoding="utf-8")
        words = ["-replay", str(folder / "traces")]
        return seconds_of(_output(folder, network, ranks, len(written), messages, words, limit_s))


def program_output(
    network: Network,
    ranks: int,
    program: Sequence[str],
    messages: Messages = Messages(),
    limit_s: float = 300.0,
) -> str:
    """Return what a program of ``smpicc`` prints in a simulated job; its computing takes no time.

    Raises:
        RuntimeError: The job has failed or not ended within the limit.
        SystemExit: SimGrid is not installed.
    """
    with tempfile.TemporaryDirectory() as name:
        words = ["--cfg=smpi/simulate-computation:no", *program]
        return _output(Path(name), network, ranks, ranks, messages, words, limit_s)


def _output(
    folder: Path,
    network: Network,
    ranks: int,
    processes: int,
    messages: Messages,
    words: Sequence[str],
    limit_s: float,
) -> str:
    found = installed()
    if found is None:
        raise SystemExit(MISSING)
    names = networks.hosts(network)[:ranks]
    placed = [names[process % ranks % len(names)] for process in range(processes)]
    (folder / "hosts").write_text("\n".join(placed) + "\n", encoding="utf-8")
    (folder / "platform.xml").write_text(networks.platform(network), encoding="utf-8")
    command = [found, *arguments(folder, processes, messages), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=folder)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the simulation has not ended within {limit_s:g} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(
            f"the simulation failed with status {done.returncode}: {' '.join(lines[-3:])}"
        )
    return done.stdout + done.stderr


def arguments(folder: Path, processes: int, messages: Messages) -> Sequence[str]:
    """Return the arguments of ``smpirun`` for the files of a folder."""
    overhead = f"0:{messages.overhead_s:.9g}:0"
    settings = {
        "smpi/bw-factor": "0:1",
        "smpi/lat-factor": "0:1",
        "network/TCP-gamma": "0",
        "network/weight-S": "0",
        "network/crosstraffic": "0",
        "smpi/os": overhead,
        "smpi/ois": overhead,
        "smpi/or": overhead,
        "smpi/send-is-detached-thresh": str(messages.eager_bytes),
        "smpi/async-small-thresh": str(messages.eager_bytes),
        "smpi/coll-selector": messages.library,
    }
    return [
        "-np",
        str(processes),
        "-platform",
        str(folder / "platform.xml"),
        "-hostfile",
        str(folder / "hosts"),
        *(f"--cfg={name}:{value}" for name, value in settings.items()),
    ]


def seconds_of(output: str) -> float:
    """Return the simulated seconds that the replayer prints.

    Raises:
        RuntimeError: There are none.
    """
    found = _TIME.findall(output)
    if not found:
        raise RuntimeError(f"the replay has printed no time: {output[-200:]}")
    return float(found[-1])
