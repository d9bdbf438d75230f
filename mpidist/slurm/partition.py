"""Partitions of a Slurm cluster: kinds of nodes, limits of time and memory; pure.

``FORMAT`` is sinfo's ``-o`` format, which every version of Slurm has. sinfo prints a line for the
nodes of one kind in one partition; ``scontrol show partition`` alone has the limits of memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

# Partition with * for the default, availability, nodes, CPUs, sockets, cores of a socket, MB of
# memory, generic resources, time limit.
FORMAT = "%P|%a|%D|%c|%X|%Y|%m|%G|%l"

_FIELDS = 9
# gpu:4, gpu:a100:4(S:0-1), gpu:a100:4(IDX:0-3)
_GPUS = re.compile(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)")
# "64+": nodes of several kinds in one line.
_COUNT = re.compile(r"[0-9]+\+?")
_UNLIMITED = ("infinite", "unlimited", "n/a")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one partition with the same hardware.

    Attributes:
        nodes: Number of such nodes.
        cpus: CPUs of a node, as Slurm counts them (hardware threads on most clusters).
        sockets: Sockets of a node; 1 where Slurm was told the number of CPUs alone.
        gpus: GPUs of a node by type; "" for a type without a name.
        memory_mb: Memory of a node in Slurm's MB of 1024 * 1024 bytes; 0 where Slurm was not told.
    """

    nodes: int
    cpus: int
    sockets: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    memory_mb: int = 0

    def gpus_of(self, type_name: str) -> int:
        """Return the GPUs of a node of one type; of all types for ""."""
        return self.gpus.get(type_name, 0) if type_name else sum(self.gpus.values())

    def __str__(self) -> str:
        gpus = " + ".join(
            f"{counted(count, 'GPU')} {name}".strip() for name, count in self.gpus.items()
        )
        memory = f", {in_words(self.memory_mb)}" if self.memory_mb else ""
        return f"{counted(self.nodes, 'node')} of {self.cpus} CPUs{memory} and {gpus or 'no GPUs'}"


@dataclass(frozen=True)
class MemoryLimits:
    """Memory of a job in a partition, in MB; 0 where Slurm was told nothing.

    Attributes:
        default_per_cpu: Of a job that asks for none, for each CPU.
        default_per_node: The same for each node.
        most_per_cpu: Largest; Slurm gives a job that asks for more the CPUs that it would need.
        most_per_node: Largest; a job that asks for more never starts.
    """

    default_per_cpu: int = 0
    default_per_node: int = 0
    most_per_cpu: int = 0
    most_per_node: int = 0

    def default_mb(self, cpus: int) -> int:
        """Return the memory of a node for a job that asks for none there; 0: all, or unknown."""
        return self.default_per_cpu * cpus or self.default_per_node


@dataclass(frozen=True)
class Partition:
    """One partition.

    Attributes:
        name: Name.
        is_default: Jobs without a partition go there.
        is_up: The partition starts jobs.
        limit_s: Largest time limit in seconds; None for no limit.
        kinds: Kinds of its nodes.
        memory: Of its jobs.
    """

    name: str
    is_default: bool
    is_up: bool
    limit_s: int | None
    kinds: Sequence[NodeKind]
    memory: MemoryLimits = MemoryLimits()

    def __str__(self) -> str:
        return f"partition {self.name} ({'; '.join(map(str, self.kinds)) or 'no nodes'})"


def parse(text: str) -> dict[str, Partition]:
    """Return the partitions by name from sinfo's output in ``FORMAT``.

    Raises:
        ValueError: The text has another form.
    """
    found: dict[str, Partition] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = line.split("|")
        if len(fields) != _FIELDS or not all(map(_COUNT.fullmatch, fields[2:7])):
            raise ValueError(f"sinfo printed another format than {FORMAT}: {line!r}")
        name = fields[0].rstrip("*")
        nodes, cpus, sockets, cores, memory = (int(word.rstrip("+")) for word in fields[2:7])
        # A socket of one core is what Slurm assumes where slurm.conf has the CPUs alone.
        sockets = sockets if cores > 1 else 1
        # 1 MB is what Slurm assumes where slurm.conf says nothing.
        kind = NodeKind(nodes, cpus, sockets, _gpus(fields[7]), memory if memory > 1 else 0)
        before = found[name].kinds if name in found else ()
        # A partition without nodes has a line, too.
        kinds = [*before, *([kind] if nodes else [])]
        found[name] = Partition(
            name, fields[0].endswith("*"), fields[1] == "up", seconds(fields[8]), kinds
        )
    return found


def with_memory_limits(found: Mapping[str, Partition], text: str) -> dict[str, Partition]:
    """Return the partitions with the limits that ``scontrol --oneliner show partition`` prints.

    Partitions that it does not name, and limits that it does not have, stay as they are.
    """
    limited = dict(found)
    for line in text.splitlines():
        pairs = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = pairs.get("PartitionName")
        if name not in limited:
            continue
        limits = MemoryLimits(
            *(
                # Without a limit: UNLIMITED.
                int(amount) if (amount := pairs.get(key, "")).isdecimal() else 0
                for key in ("DefMemPerCPU", "DefMemPerNode", "MaxMemPerCPU", "MaxMemPerNode")
            )
        )
        limited[name] = replace(limited[name], memory=limits)
    return limited


def seconds(text: str) -> int | None:
    """Return the seconds of a time limit of Slurm; None without a limit.

    Args:
        text: As for sbatch's ``--time``: minutes, ``30:00``, ``1:00:00``, ``1-12``, ``1-12:00:00``.
    """
    if text.lower() in _UNLIMITED:
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, rest = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, rest = parts
    else:
        hours, minutes, rest = 0, *[*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def megabytes(text: str) -> int:
    """Return the MB of an amount of memory of Slurm: ``4000``, ``4000M``, ``64G``, ``1T``."""
    match = re.match(r"([0-9]+)([KGT]?)", text.upper())
    assert match is not None
    kilobytes = int(match[1]) * {"K": 1, "": 1024, "G": 1024**2, "T": 1024**3}[match[2]]
    return -(-kilobytes // 1024)


def in_words(memory_mb: int) -> str:
    """Return a text for an amount of memory: "512 MiB", "187 GiB"."""
    return f"{memory_mb} MiB" if memory_mb < 1024 else f"{memory_mb / 1024:.0f} GiB"


def counted(number: int, noun: str) -> str:
    """Return a text for a number of things: "1 node", "2 nodes"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _gpus(text: str) -> dict[str, int]:
    gpus: dict[str, int] = {}
    for name, count in _GPUS.findall(text):
        gpus[name] = gpus.get(name, 0) + int(count)
    return gpus
