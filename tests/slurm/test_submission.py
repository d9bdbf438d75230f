"""Submission by commands of Slurm: sinfo, sbatch, and the function of the Python API."""

import logging
import os
import re
import subprocess
import sys

import pytest

from mpidist import slurm
from mpidist.errors import LaunchError
from mpidist.slurm import submission
from mpidist.slurm.job_plan import JobPlan
from mpidist.slurm.job_script import Options


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return a function that puts a shell script under a name first on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    monkeypatch.chdir(tmp_path)
    for name in ("PARTITION", "TIMELIMIT", "GPUS_PER_NODE", "MEM_PER_NODE", "MEM_PER_CPU"):
        monkeypatch.delenv(f"SBATCH_{name}", raising=False)
    for name in ("SBATCH_MEM_PER_GPU", "MPIDIST_SLURM"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "train.py").write_text("")

    def put(name, text):
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)

    put("sinfo", 'echo "gpu*|up|3|32|2|16|64000|gpu:4|infinite"')
    return put


def test_sbatch_gets_the_text_and_its_status_is_passed_on(commands, monkeypatch, capfd, tmp_path):
    commands("sbatch", '[ "$*" ] || { echo "$SBATCH_ACCOUNT|$SBATCH_QOS|$(cat)"; exit 3; }')
    monkeypatch.setenv("SBATCH_ACCOUNT", "other")
    monkeypatch.setenv("SBATCH_QOS", "low")
    plan = JobPlan("a job", Options({"account": "mine"}), ())
    assert submission.call_sbatch(plan).returncode == 3
    assert capfd.readouterr().out == "|low|a job\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"sbatch was not found.*--dry-run"):
        submission.call_sbatch(plan)


def test_sbatch_gets_the_bytes_of_an_argument(commands, tmp_path):
    commands("sbatch", f"cat > {tmp_path}/job; echo 7")
    slurm.submit("ddp", "train.py", os.fsdecode(b"--name=caf\xe9"), "--also=caf\u00e9")
    lines = (tmp_path / "job").read_bytes().splitlines()
    line = next(line for line in lines if line.startswith(b"set -- "))
    assert line.endswith(b"'--name=caf\xe9' " + os.fsencode("'--also=caf\u00e9'"))


@pytest.mark.parametrize("text", ["exit 1", "echo nonsense", "true"])
def test_a_sinfo_that_fails_leaves_the_partitions_unknown(commands, text):
    assert list(submission.partitions()) == ["gpu"]
    commands("sinfo", text)
    assert submission.partitions() is None


def test_a_job_above_the_partitions_memory_is_refused_before_sbatch(commands):
    shown = "PartitionName=gpu DefMemPerCPU=3000 MaxMemPerNode=48000"
    commands("scontrol", f'[ "$*" = "--oneliner --all show partition" ] && echo "{shown}"')
    commands("sbatch", "touch called; echo 4711")
    with pytest.raises(LaunchError, match=r"jobs get at most 48000M: --mem 48000M"):
        slurm.submit("ddp", "train.py", mem="60G")
    commands("scontrol", "exit 1")
    assert submission.partitions()["gpu"].memory.most_per_node == 0
    assert slurm.submit("ddp", "train.py", mem="60G").id == "4711"


def test_no_sinfo_leaves_the_partitions_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submission.partitions() is None


def test_a_job_is_submitted_by_the_plan_of_the_command(commands, tmp_path, caplog):
    commands(
        "sbatch",
        f'cat > {tmp_path}/$1; [ $1 = --test-only ] || echo "4711;here"; [ $# = 1 ]',
    )
    with caplog.at_level(logging.INFO, "mpidist"):
        job = slurm.submit(
            "ddp",
            tmp_path / "train.py",
            "--epochs",
            "3",
            nodes=2,
            mem=0,
            time=30,
            sbatch={"qos": "low"},
        )
    assert job.id == "4711" and repr(job) == "Job('4711')"
    text = (tmp_path / "--parsable").read_text()
    assert (tmp_path / "--test-only").read_text() == text
    for line in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "mem=0", "time=30", "qos=low"):
        assert f"#SBATCH --{line}\n" in text
    assert f"\nset -- {tmp_path}/train.py --epochs 3\n" in text
    assert "2 nodes; on each 4 ranks of 4 CPUs, 4 GPUs" in caplog.text
    command = [sys.executable, "-m", "mpidist", "submit", "ddp", "--nodes", "2", "--mem", "0"]
    command += [
        "--time",
        "30",
        "--sbatch",
        "qos=low",
        "--dry-run",
        "--",
        "train.py",
        "--epochs",
        "3",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert printed.stdout == text


def test_a_job_that_slurm_would_not_start_is_not_submitted(commands, tmp_path):
    says = "allocation failure: Requested node configuration is not available"
    commands(
        "sbatch", f"[ $1 = --test-only ] || touch {tmp_path}/called; echo '{says}' >&2; exit 1"
    )
    words = rf"{says}\. The job: 9 nodes; .*; partition gpu \(3 nodes of 32 CPUs, .* 4 GPUs\)"
    with pytest.raises(LaunchError, match=words):
        slurm.submit("ddp", "train.py", nodes=9)
    command = [sys.executable, "-m", "mpidist", "submit", "ddp", "--nodes", "9"]
    done = subprocess.run([*command, "--", "train.py"], capture_output=True, text=True)
    assert done.returncode == 2 and re.search(words, " ".join(done.stderr.split())), done.stderr
    # The way past it.
    command += ["--dry-run", "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "#SBATCH --nodes=9" in done.stdout
    assert not (tmp_path / "called").exists()
    with pytest.raises(LaunchError, match="sbatch ended with 1"):
        slurm.submit("ddp", "train.py", nodes=9, is_tested=False)
    assert (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("echo 'wrapped: no such account'; exit 1", "wrapped: no such account"),
        ("exit 3", "status 3, without a word"),
        (r"printf 'caf\351 closed' >&2; exit 1", "caf\ufffd closed"),
    ],
)
def test_whatever_the_test_prints_is_the_reason(commands, says, words):
    commands("sbatch", says)
    with pytest.raises(LaunchError, match=f"sbatch --test-only: {words}"):
        slurm.submit("ddp", "train.py")


def test_a_test_without_an_answer_has_submitted_nothing(commands, monkeypatch):
    commands("sbatch", "exec sleep 60")
    monkeypatch.setattr(submission, "_SUBMIT_S", 0.2)
    with pytest.raises(LaunchError, match=r"^sbatch --test-only did not answer within 0\.2 s$"):
        slurm.submit("ddp", "train.py")


def test_what_sbatch_says_is_the_error(commands):
    says = "echo 'sbatch: error: invalid account' >&2; exit 1"
    commands("sbatch", f"[ $1 = --test-only ] || {{ {says}; }}")
    with pytest.raises(LaunchError, match="sbatch ended with 1: sbatch: error: invalid account"):
        slurm.submit("ddp", "train.py")
