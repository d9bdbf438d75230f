"""Examples that end the help of each subcommand."""

from __future__ import annotations

EXAMPLES = {
    "doctor": ["mpidist doctor", "mpirun -n 4 mpidist doctor --json found.json"],
    "run": [
        "mpidist run -n 4 train.py --epochs 3",
        "mpidist run -n 4 -m package.train",
        "mpidist run --dry-run -n 4 train.py",
    ],
    "bench": [
        "mpidist bench collectives -n 2 --output results",
        "mpidist bench ddp -- --models mlp:64 --rounds 5",
        "mpidist bench scaling -- sweep",
    ],
    "tune": ["srun mpidist tune", "mpidist tune -n 4"],
    "clean": ["mpidist clean", "srun --ntasks-per-node=1 mpidist clean"],
    "trace": [
        "mpidist trace summary run.json.gz",
        "mpidist trace merge all.json.gz run.json.gz rank0.json rank1.json",
    ],
    "report": [
        "mpidist report",
        "mpidist report 4711 --torch dumps",
        "srun --jobid 4711 --overlap --ntasks-per-node=1 mpidist report 4711",
    ],
    "submit": [
        "mpidist submit ddp --nodes 2 --time 1:00:00 -- train.py",
        "mpidist submit test --gpus-per-node 0 --dry-run",
        "mpidist submit ddp --set MPIDIST_MODULES=openmpi/5 -- train.py",
    ],
}


def epilog(*lines: str) -> str:
    """Return the last lines of a help text."""
    return "\n\n".join([f"Example{'s' * (len(lines) > 1)}:", *lines])
