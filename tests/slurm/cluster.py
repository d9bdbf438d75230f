"""Virtual cluster: a real Slurm with slurmd for nodes n1 to n3 on this machine.

python -m tests.slurm.cluster install         install missing packages of Debian;
                                              otherwise status 77 and the reason
python -m tests.slurm.cluster start FOLDER    start the daemons in the background;
                                              then: export SLURM_CONF=FOLDER/slurm.conf
python -m tests.slurm.cluster stop FOLDER     end the daemons and the processes of jobs
python -m tests.slurm.cluster hold FOLDER     start; at the end of stdin or at SIGTERM stop,
                                              and remove FOLDER

Start and stop need root, because slurmd starts processes of other users. Python's standard library
is enough.

Each slurmd has its own host name (a UTS namespace), so that MPI treats the nodes as separate
machines: ``srun --mpi=pmix`` (Open MPI), ``srun --mpi=pmi2`` (MPICH) and ``mpirun`` within a job
span them. GPUs are counts in Slurm's configuration, without devices.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.slurm import processes
from tests.slurm.packages import UNSHARE, install, path_of, problem

NODES = ("n1", "n2", "n3")
# CPUs of a node in Slurm's configuration.
CPUS = 4
# Slurm represents a GPU by a file. Any character device is valid; Slurm ignores a count without
# files.
GPU_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
UNAVAILABLE = 77
START_S, STOP_S = 30, 10

CONFIG = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
# MPICH names its shared memory by the job's number: that of a killed job of a cluster before stays
# in /dev/shm, and MPI_Init of another job with its number is out of memory.
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
# PMIx needs one folder per node, too.
TmpFS={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
# No cgroups, which few containers allow, and no accounting, which needs a database.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
# Jobs share a node by cores; Slurm's configuration has more cores than the machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
GresTypes=gpu
JobRequeue=1
KillWait=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
# Two nodes for all jobs; on the third, jobs of partition urgent preempt and requeue those of low.
PartitionName=train Nodes=n[1-2] Default=YES MaxTime=60 State=UP
PartitionName=low Nodes=n3 MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes=n3 MaxTime=60 PriorityTier=2 State=UP
"""


class ClusterError(Exception):
    """Failed start of the cluster; the text has the reason."""


def start(folder: Path) -> None:
    """Write the configuration and start the daemons; return when both nodes are idle.

    Args:
        folder: Folder for all files, created if missing. The path has at most 60 bytes, because
            names of Unix sockets are limited.

    Raises:
        ClusterError: A requirement is missing, or a daemon did not start; the text includes the end
            of the daemon's log.
    """
    if missing := problem():
        raise ClusterError(missing)
    if len(os.fsencode(folder)) > 60:
        raise ClusterError(
            f"{folder} is too long for the names of sockets; choose a folder below /tmp"
        )
    _write_files(folder)
    try:
        for name, command in _daemons(folder):
            _spawn(folder, name, command)
        _wait_for_nodes(folder)
    except BaseException:
        stop(folder)
        raise


def stop(folder: Path) -> None:
    """End the daemons of ``folder`` and the processes of their jobs, and no others."""
    if processes.marked(folder):
        _command(folder, "scancel", "--full", "--user=root", timeout_s=5)
        processes.wait(lambda: not _command(folder, "squeue", "-h", timeout_s=5), STOP_S)
    recorded = folder / "pids.json"
    daemons = json.loads(recorded.read_text()) if recorded.exists() else []
    alive = processes.marked(folder)
    processes.end([pid for pid in reversed(daemons) if pid in alive])
    # As on a real cluster, job steps survive their slurmd.
    processes.end(processes.marked(folder))
    recorded.unlink(missing_ok=True)


def leftovers(folder: Path) -> dict[int, str]:
    """Return command lines by process id of the cluster in ``folder``, including jobs."""
    return {
        pid: processes.read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
        for pid in processes.marked(folder)
    }


def hold(folder: Path) -> None:
    """Start, report on stdout, and at the end of stdin or at SIGTERM stop and remove ``folder``."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    start(folder)
    try:
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder: Path) -> None:
    for name in ("", "state", *NODES):
        (folder / name).mkdir(mode=0o755, parents=True, exist_ok=True)
    key = folder / "munge.key"
    key.unlink(missing_ok=True)
    with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o400), "wb") as file:
        file.write(os.urandom(128))
    control_port, *ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={CPUS} RealMemory=16384 Gres=gpu:{len(GPU_FILES)} State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    )
    config = CONFIG.format(
        host=socket.gethostname().split(".")[0],
        folder=folder,
        control_port=control_port,
        first_job=1 + int(time.time()) % 1_000_000,
        nodes=nodes,
    )
    (folder / "slurm.conf").write_text(config)
    (folder / "gres.conf").write_text(
        f"AutoDetect=off\nNodeName={','.join(NODES)} Name=gpu File={','.join(GPU_FILES)}\n"
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _daemons(folder: Path) -> list[tuple[str, list[str]]]:
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--seed-file={folder}/munged.seed",
        f"--log-file={folder}/munged.log",
    ]
    slurmd = path_of("slurmd")
    # Open MPI compares its host name with Slurm's. unshare and sh end in exec, so that the process
    # id stays the same.
    named = [*UNSHARE, "sh", "-c", 'hostname "$1"; exec "$0" -D -c -N "$1"']
    nodes = [(f"slurmd-{name}", [*named, str(slurmd), name]) for name in NODES]
    return [("munged", munged), ("slurmctld", ["slurmctld", "-D", "-c"]), *nodes]


def _spawn(folder: Path, name: str, command: list[str]) -> None:
    program = path_of(command[0])
    assert program is not None
    output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    # A session of its own: Ctrl-C reaches only the parent, which ends the daemons in order.
    process = subprocess.Popen(
        [program, *command[1:]],
        env=processes.environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=folder,
        start_new_session=True,
    )
    os.close(output)
    recorded = folder / "pids.json"
    pids = json.loads(recorded.read_text()) if recorded.exists() else []
    recorded.write_text(json.dumps([*pids, process.pid]))
    ready = folder / "munge.socket" if name == "munged" else None
    began = processes.wait(
        lambda: process.poll() is not None or ready is None or ready.exists(), START_S
    )
    if not began or process.poll() is not None:
        raise ClusterError(f"{name} did not start: {_ends(folder, name)}")


def _wait_for_nodes(folder: Path) -> None:
    def idle() -> bool:
        lines = _command(folder, "sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return set(lines) == {f"{name} idle" for name in NODES}

    if not processes.wait(idle, START_S):
        ends = "; ".join(_ends(folder, name) for name in ("slurmctld", *NODES))
        raise ClusterError(f"nodes are not idle after {START_S} s: {ends}")


def _ends(folder: Path, name: str) -> str:
    texts = [
        path.read_text(errors="replace")[-600:]
        for path in (folder / f"{name}.log", folder / f"{name}.out")
        if path.exists()
    ]
    return f"{name}: {' '.join(texts).strip() or 'no output'}"


def _command(folder: Path, *words: str, timeout_s: float = 10) -> str:
    """Return the output of a Slurm command; empty after a failure or a timeout."""
    try:
        done = subprocess.run(
            words,
            env=processes.environment(folder),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return ""
    return done.stdout.strip()


def main(words: list[str]) -> int:
    if words == ["install"]:
        reason = install()
        print(f"no virtual cluster here: {reason}" if reason else "Slurm is installed")
        return UNAVAILABLE if reason else 0
    if len(words) != 2 or words[0] not in ("start", "stop", "hold"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(words[1]).resolve()
    try:
        {"start": start, "stop": stop, "hold": hold}[words[0]](folder)
    except ClusterError as error:
        print(f"no virtual cluster here: {error}", file=sys.stderr)
        return 1
    if words[0] == "start":
        print(f"export {processes.MARK}={folder}/slurm.conf")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
