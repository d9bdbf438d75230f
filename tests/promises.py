"""Tests of what README and the pages promise, once each: ``make test`` runs them on several ranks.

``python -m tests.promises mpi`` prints those for the ranks of one MPI job, which pass at two and at
three ranks; ``jobs`` those that start whole jobs by themselves. ``make test-all`` runs every test.
"""

from __future__ import annotations

import sys

# By the page that promises it.
MPI = {
    "docs/process-group.md": [
        "tests/comm/test_collectives.py",
        "tests/integration/test_torch_api.py",
        "tests/integration/test_order.py",
    ],
    "docs/several-programs.md": ["tests/comm/coupling/test_coupling.py"],
    "docs/data-parallel.md": [
        "tests/ddp/test_training.py",
        "tests/ddp/hooks/test_powersgd.py",
        "tests/integration/test_torch_ddp.py",
    ],
    "docs/outer-steps.md": [
        "tests/ddp/test_diloco.py::test_all_ranks_do_what_one_process_computes",
    ],
    "docs/sharded-optimizer.md": ["tests/zero/test_training.py"],
    "docs/rpc.md": ["tests/rpc/test_api.py", "tests/rpc/test_rref.py"],
    "docs/distributed-autograd.md": [
        "tests/autograd/test_engine.py::test_random_graphs_equal_one_process",
    ],
    "docs/remote-modules.md": ["tests/nn/test_training.py"],
    "docs/optimizers.md": ["tests/optim/test_training.py"],
    "docs/checkpoints.md": [
        "tests/checkpoint/test_training.py::test_a_run_goes_on_with_the_same_bits",
    ],
    "docs/timeline.md": [
        "tests/trace/test_timeline.py::test_trace_has_all_ranks_and_their_arrows",
    ],
}
JOBS = {
    "README.md": ["tests/docs/test_readme.py"],
    "docs/when-ranks-die.md": [
        "tests/elastic/test_recovery.py::test_a_job_outlives_its_ranks_until_too_few_are_left",
    ],
    "docs/checkpoints.md": [
        "tests/cli/test_restarts.py::test_killed_ranks_are_started_again_from_their_commits",
    ],
    "docs/after-a-hang.md": [
        "tests/comm/watchdog/test_watchdog.py::test_a_missing_rank_is_reported_and_the_job_ends",
    ],
    "docs/command.md": [
        "tests/cli/test_run.py::test_the_exit_status_is_the_jobs_and_a_signal_ends_it",
    ],
}
# What these pages promise needs more than `make test` installs: `make test-all` shows it.
IN_TEST_ALL = {
    "docs/slurm.md": "a Slurm of virtual nodes: make slurm",
    "docs/frameworks.md": "the frameworks: make slow",
}


def main(kind: str) -> None:
    """Print the tests of a kind, for a command line of pytest."""
    print(*(test for tests in {"mpi": MPI, "jobs": JOBS}[kind].values() for test in tests))


if __name__ == "__main__":
    main(sys.argv[1])
