"""Python API of jobs on a real Slurm: submission, states, logs, cancellation, refusals."""

from __future__ import annotations

import time

import pytest

import mpidist.slurm
from mpidist.errors import LaunchError
from tests.slurm.conftest import LIMIT_S

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def submitted(slurm, tmp_path_factory):
    """Return a function that submits the text of a program, with all CPUs and GPUs left out."""
    env = slurm.site("api") / "env.sh"
    # The number of GPUs is left out: set within the job, where the plan does not look.
    env.write_text(env.read_text().replace('NODE="1"', 'NODE="$((1))"'))

    def submit(text, script="ddp", **options):
        program = tmp_path_factory.mktemp("program") / "program.py"
        program.write_text(text)
        options = {"settings": {"MPIDIST_GPUS_PER_NODE": "0"}, "cpus_per_task": 1, **options}
        arguments = [program] if text else []
        return mpidist.slurm.submit(script, *arguments, env=env, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, text in slurm.environment.items():
            monkeypatch.setenv(name, text)
        monkeypatch.chdir(slurm.work)
        yield submit


@pytest.fixture(scope="module", autouse=True)
def self_check(submitted):
    """Return a job that the last test waits for: it runs while the others wait for theirs."""
    return submitted("", "test", nodes=2, ntasks_per_node=1)


def test_a_job_is_waited_for_and_its_log_read(submitted):
    job = submitted("print('fine')", ntasks_per_node=2)
    assert job.wait(LIMIT_S, poll_s=0.2) == "COMPLETED" and job.done()
    assert job.stdout().count("fine") == 2 and job.paths()[0].name == f"mpidist-ddp-{job.id}.out"
    failed = submitted("raise SystemExit(3)", ntasks_per_node=1, name="fails")
    assert failed.wait(LIMIT_S, poll_s=0.2) == "FAILED"
    assert mpidist.slurm.Job(failed.id).paths()[0].name == f"fails-{failed.id}.out"


def test_a_job_that_goes_on_is_cancelled(submitted):
    job = submitted("import time; time.sleep(600)", ntasks_per_node=1)
    with pytest.raises(TimeoutError, match="has not ended"):
        job.wait(0.5, poll_s=0.1)
    job.cancel()
    assert job.wait(LIMIT_S, poll_s=0.2) == "CANCELLED"


def test_a_signal_before_the_handler_is_explained_in_the_log(slurm, submitted):
    # As a rank that imports torch when the signal comes.
    job = submitted("print('begun'); import time; time.sleep(600)", ntasks_per_node=2)
    end = time.monotonic() + LIMIT_S
    while job.stdout().count("begun") < 2:
        assert not job.done() and time.monotonic() < end, job.stdout()
        time.sleep(0.1)
    slurm.command("scancel", "--signal=USR1", job.id)
    assert job.wait(LIMIT_S, poll_s=0.2) == "FAILED"
    assert "SIGUSR1 ended a rank: it came before" in job.stdout()


def test_what_slurm_would_never_start_is_refused(slurm, submitted):
    has_no = "Requested node configuration is not available"
    before = slurm.command("squeue", "--noheader", "--format=%i").split()
    for options, words in [
        ({"nodes": 3}, rf"{has_no}.*partition train \(2 nodes of 4 CPUs, .* and 6 GPUs\)"),
        ({"mem": "900G"}, has_no),
        ({"mem": None, "sbatch": {"mem-per-cpu": "90G"}}, has_no),
        ({"ntasks_per_node": 5}, has_no),
        ({"ntasks_per_node": 2, "cpus_per_task": 3}, has_no),
        ({"settings": {}, "gpus_per_node": 7}, has_no),
        ({"settings": {}, "gpus_per_node": "h100:1"}, has_no),
        ({"partition": "moon"}, "invalid partition specified: moon"),
        # Slurm would let the job wait for ever.
        ({"time": "2:00:00"}, "at most --time 60"),
    ]:
        with pytest.raises(LaunchError, match=words):
            submitted("", **options)
    assert set(slurm.command("squeue", "--noheader", "--format=%i").split()) <= set(before)


def test_numbers_left_out_give_a_job_that_runs(submitted):
    job = submitted("print('fine')", settings=None)
    assert job.wait(LIMIT_S, poll_s=0.2) == "COMPLETED"
    # Four CPUs and six GPUs a node: four ranks.
    assert job.stdout().count("fine") == 4 and "GPUs of a node: 4" in job.stdout()


def test_the_self_check_looks_at_both_nodes(self_check):
    assert self_check.wait(LIMIT_S, poll_s=0.2) == "COMPLETED", self_check.stdout()
    log = self_check.stdout()
    assert "node 0      n1: rank 0" in log and "node 1      n2: rank 1" in log
    assert "init_process_group and all_reduce" in log and "clocks differ" not in log
    assert "self-check: 2 ranks, all fine" in log and "mpidist: PASS" in log
