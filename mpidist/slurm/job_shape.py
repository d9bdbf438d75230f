"""Ranks, CPUs, GPUs and memory of a job on its nodes: defaults of a partition, objections; pure.

A header is a dict of sbatch's long options. ``given`` are the options of the user and the site,
``shipped`` those in the script's ``#SBATCH`` lines, which hold where neither says anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpidist.slurm.partition import NodeKind, Partition, counted, in_words, megabytes, seconds

# Other options of sbatch that ask for GPUs; what they amount to is left to Slurm.
_OTHER_GPUS = ("gpus", "gres", "gpus-per-socket", "tres-per-node")
_HIDING = ("gpus-per-task", "gpu-bind")
# Largest number of ranks of a node by default: each task of a sweep is a job of its own.
_MOST_RANKS = {"array": 1}
_SIGNAL = re.compile(r"(?:[RB]*:)?(\w+)(?:@(\d+))?")
# sbatch(1), --signal, without a time.
_LEAD_S = 60


@dataclass(frozen=True)
class Shape:
    """A job on its nodes.

    Attributes:
        nodes: Number of nodes.
        ranks: Ranks of a node; of the fullest one, if the nodes differ.
        cpus: CPUs of a rank.
        gpus: GPUs of a node; None if another option than ``--gpus-per-node`` asks for them.
        gpu_type: Type of these GPUs; "" for any.
        memory_mb: Memory of a node; 0 for the partition's default, or all of the node.
    """

    nodes: int
    ranks: int
    cpus: int
    gpus: int | None
    gpu_type: str = ""
    memory_mb: int = 0

    def __str__(self) -> str:
        gpus = (
            "" if self.gpus is None else f", {counted(self.gpus, 'GPU')} {self.gpu_type}".rstrip()
        )
        ranks = f"{counted(self.ranks, 'rank')} of {counted(self.cpus, 'CPU')}"
        memory = f", {in_words(self.memory_mb)}" if self.memory_mb else ""
        return f"{counted(self.nodes, 'node')}; on each {ranks}{gpus}{memory}"


def shape_of(header: Mapping[str, str | None]) -> Shape:
    """Return the shape that a complete header asks for. Numbers must be valid."""
    nodes = int(header.get("nodes") or 1)
    tasks, per_node = header.get("ntasks"), header.get("ntasks-per-node")
    # With both sbatch takes the second for a limit.
    ranks = -(-int(tasks) // nodes) if tasks else int(per_node or 1)
    gpu_type, gpus = _gpus(header)
    cpus = int(header.get("cpus-per-task") or 1)
    memory_mb = sum(
        megabytes(header.get(option) or "0") * units
        for option, units in _memory_units(ranks, cpus, gpus).items()
    )
    return Shape(nodes, ranks, cpus, gpus, gpu_type, memory_mb)


def completed(
    name: str,
    given: Mapping[str, str | None],
    shipped: Mapping[str, str],
    partition: Partition | None,
) -> dict[str, str | None]:
    """Return ``given`` with the numbers that it leaves open; None removes a line of the script.

    One rank for each GPU. With a partition: all GPUs of its most frequent kind of node; without
    GPUs a rank for each socket; CPUs by shares, but for a rank with a GPU no more than the script
    says; as many nodes as the script's number of ranks needs; the script's time limit, or the
    partition's if that is shorter. Without one the script's numbers.

    Args:
        name: Name of the job script.
        given: Options of the user and the site.
        shipped: Options of the script.
        partition: The job's partition; None if unknown.
    """
    header = dict(given)
    kind = _likely(given, partition)
    most = _MOST_RANKS.get(name)
    _, gpus = _gpus(given)
    if "gpus-per-node" not in given and gpus is not None:
        gpus = int((shipped.get("gpus-per-node") or "0").split(":")[-1])
        if kind is not None:
            asked = shape_of({**shipped, **given}).ranks if _has_ranks(given) else most
            # A rank for each needs a CPU, too.
            held = _held(min(kind.gpus_of(""), kind.cpus), kind, given, "mem-per-gpu")
            gpus = min(held, asked or held)
            header["gpus-per-node"] = str(gpus)
    if gpus is None or (gpus == 0 and "gpus-per-node" in header):
        header["gpus-per-node"] = None
    if "ntasks-per-node" in shipped:
        if "ntasks" in given:
            header.setdefault("ntasks-per-node", None)
        elif "ntasks-per-node" not in given:
            if gpus and "gpus-per-node" in header:
                header["ntasks-per-node"] = str(gpus)
            elif kind is not None and gpus == 0:
                header["ntasks-per-node"] = str(min(kind.sockets, most or kind.sockets))
    if kind is None:
        return header
    assert partition is not None
    if "time" not in given and _is_above(shipped.get("time"), partition):
        header["time"] = str((partition.limit_s or 0) // 60)
    ranks = shape_of({**shipped, **header}).ranks
    if "cpus-per-task" in shipped and "cpus-per-task" not in given:
        share = max(1, _held(kind.cpus, kind, given, "mem-per-cpu") // ranks)
        limited = bool(gpus) or gpus is None or most is not None
        header["cpus-per-task"] = str(
            min(share, int(shipped["cpus-per-task"])) if limited else share
        )
    if "nodes" in shipped and "nodes" not in given:
        least = shape_of(shipped)
        wanted = max(least.nodes, -(-least.nodes * least.ranks // ranks))
        header["nodes"] = str(min(wanted, max(kind.nodes, 1)))
    return header


def own_objections(header: Mapping[str, str | None], has_cpu_ranks: bool = False) -> list[str]:
    """Return why a job of this complete header fails on every cluster; empty if it does not.

    Args:
        header: The options.
        has_cpu_ranks: Ranks of some programs use no GPU, so there may be more ranks than GPUs.
    """
    shape = shape_of(header)
    found = [
        f"--{key} hides the GPUs of a node from its other ranks: --gpus-per-node and "
        "--ntasks-per-node alone"
        for key in _HIDING
        if header.get(key)
    ]
    if shape.gpus and shape.ranks > shape.gpus and not has_cpu_ranks:
        found.append(
            f"{shape.ranks} ranks and {shape.gpus} GPUs on a node: the same number for "
            f"--ntasks-per-node and --gpus-per-node, as --ntasks-per-node {shape.gpus}, or "
            "--gpus-per-node 0"
        )
    if header.get("ntasks") and int(header["ntasks"] or 0) < shape.nodes:
        found.append(
            f"{header['ntasks']} ranks cannot be on {shape.nodes} nodes: --nodes {header['ntasks']}"
        )
    lead = _SIGNAL.fullmatch(header.get("signal") or "")
    limit_s = seconds(header.get("time") or "infinite")
    if lead is not None and limit_s is not None:
        lead_s = int(lead[2] or _LEAD_S)
        if limit_s <= lead_s:
            found.append(
                f"SIG{lead[1]} comes {lead_s} s before the time limit of {limit_s} s, so that the "
                f"ranks get it at their start: --time {lead_s // 60 + 5}, or --sbatch "
                f"signal={lead[1]}@{limit_s // 4}"
            )
    return found


def objections(header: Mapping[str, str | None], partition: Partition) -> list[str]:
    """Return limits of a partition that a job of this complete header is above.

    sbatch accepts such a job, unless the site has set EnforcePartLimits, and it never starts. What
    no node has, ``sbatch --test-only`` says.
    """
    found = []
    if _is_above(header.get("time"), partition):
        most = (partition.limit_s or 0) // 60
        found.append(f"--time {header['time']} is above its limit: at most --time {most}")
    shape, limits = shape_of(header), partition.memory
    cpus = max((kind.cpus for kind in partition.kinds), default=0)
    most_mb = min(filter(None, (limits.most_per_node, limits.most_per_cpu * cpus)), default=0)
    if 0 < most_mb < shape.memory_mb:
        units = _memory_units(shape.ranks, shape.cpus, shape.gpus)
        option = next(one for one in units if megabytes(header.get(one) or "0"))
        found.append(
            f"--{option} {header[option]} is {shape.memory_mb}M on a node, and jobs get at most "
            f"{most_mb}M: --{option} {most_mb // units[option]}M"
        )
    return found


def _is_above(time: str | None, partition: Partition) -> bool:
    asked_s = seconds(time or "infinite")
    return asked_s is not None and partition.limit_s is not None and asked_s > partition.limit_s


def cpus_for_memory(shape: Shape, partition: Partition) -> int:
    """Return the CPUs of a node that a job gets for its memory, if these are more; else its own."""
    cpus, most = shape.ranks * shape.cpus, partition.memory.most_per_cpu
    return max(cpus, -(-shape.memory_mb // most)) if most else cpus


def _memory_units(ranks: int, cpus: int, gpus: int | None) -> dict[str, int]:
    """Return the options with an amount of memory, and how often each counts on a node."""
    return {"mem": 1, "mem-per-cpu": ranks * cpus, "mem-per-gpu": gpus or 0}


def _held(most: int, kind: NodeKind, given: Mapping[str, str | None], option: str) -> int:
    """Return how many CPUs or GPUs, at most ``most``, a node has memory for; never none."""
    each_mb = megabytes(given.get(option) or "0")
    return min(most, max(kind.memory_mb // each_mb, 1)) if each_mb and kind.memory_mb else most


def _fits(shape: Shape, kind: NodeKind) -> bool:
    return (
        shape.ranks * shape.cpus <= kind.cpus
        and (shape.gpus or 0) <= kind.gpus_of(shape.gpu_type)
        and (not kind.memory_mb or shape.memory_mb <= kind.memory_mb)
    )


def _likely(given: Mapping[str, str | None], partition: Partition | None) -> NodeKind | None:
    """Return the most frequent kind of node that the given options fit on; else of all kinds."""
    kinds: Sequence[NodeKind] = () if partition is None else partition.kinds
    asked = shape_of(given)
    fitting = [kind for kind in kinds if _fits(asked, kind)] or kinds
    return max(fitting, key=lambda kind: kind.nodes, default=None)


def _gpus(header: Mapping[str, str | None]) -> tuple[str, int | None]:
    if not header.get("gpus-per-node") and any(header.get(key) for key in _OTHER_GPUS):
        return "", None
    gpu_type, _, count = (header.get("gpus-per-node") or "0").rpartition(":")
    return gpu_type, int(count)


def _has_ranks(header: Mapping[str, str | None]) -> bool:
    return bool(header.get("ntasks") or header.get("ntasks-per-node"))
