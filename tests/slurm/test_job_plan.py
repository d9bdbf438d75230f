"""Plan of a submission: shipped scripts, site values, partitions, refusals."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mpidist import shipped
from mpidist.errors import LaunchError
from mpidist.slurm import job_plan
from mpidist.slurm.job_script import Options
from mpidist.slurm.partition import MemoryLimits, NodeKind, parse

_DDP = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4

set -euo pipefail
source "$MPIDIST_SLURM/env.sh"
srun "$@"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of scripts, and a working folder with a program and an env.sh."""
    scripts, here = tmp_path / "scripts", tmp_path / "here"
    for folder in (scripts, here):
        folder.mkdir()
    for name in ("array", "bench", "couple", "ddp", "test"):
        (scripts / f"{name}.sbatch").write_text(_DDP)
    for name in ("bench_collectives.py", "coupled_heat.py"):
        (scripts / name).write_text("")
    (scripts / "env.sh").write_text('MPIDIST_GPUS_PER_NODE="4"\nMPIDIST_VENV=""\n')
    (here / "env.sh").write_text(
        'MPIDIST_ACCOUNT="mine"\nMPIDIST_GPUS_PER_NODE="2"\nMPIDIST_VENV="$HOME/venv"\n'
    )
    (here / "train.py").write_text("")
    (here / "collectives").write_text("a file of a benchmark's name")
    (here / "crlf.sh").write_bytes(b'MPIDIST_GPUS_PER_NODE="2"\r\n')
    (here / "binary.sh").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(shipped, "folder", lambda name: scripts)
    monkeypatch.chdir(here)
    return tmp_path


def test_the_sites_values_and_the_users_options_meet(site):
    plan = job_plan.planned(
        "ddp", Options({"nodes": "2"}, {}, ("train.py", "--epochs", "3")), Path("env.sh"), {}
    )
    text, lines = plan.text, plan.text.splitlines()
    wanted = [
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --account=mine",
    ]
    assert [line for line in lines if line.startswith("#SBATCH")] == wanted
    assert f"export MPIDIST_SLURM={site}/scripts" in lines and f"source {site}/here/env.sh" in lines
    assert f"set -- {site}/here/train.py --epochs 3" in lines
    assert "export MPIDIST_ACCOUNT=mine" in lines and "MPIDIST_VENV" not in text
    assert plan.options.header["ntasks-per-node"] == "2"


def test_no_gpus_and_ranks_of_ones_own(site):
    text = job_plan.planned("ddp", Options({"gpus-per-node": "0"}), None, {}).text
    assert (
        "gpus-per-node" not in text
        and "#SBATCH --ntasks-per-node=4" in text
        and "MPIDIST_GPUS_PER_NODE=0" in text
    )
    text = job_plan.planned(
        "ddp", Options({"gpus-per-node": "a100:8", "ntasks-per-node": "2"}), None, {}
    ).text
    assert "#SBATCH --gpus-per-node=a100:8" in text and "#SBATCH --ntasks-per-node=2" in text
    text = job_plan.planned(
        "ddp",
        Options({}, {"MPIDIST_GPUS_PER_NODE": "1"}),
        None,
        {"MPIDIST_SLURM": str(site / "here")},
    ).text
    assert "#SBATCH --gpus-per-node=1" in text and "#SBATCH --account=mine" in text


@pytest.mark.parametrize(
    ("name", "options", "env", "words"),
    [
        ("gone", Options({}), None, "no job script gone: array, bench, couple, ddp"),
        ("ddp", Options({}), Path("gone.sh"), "gone.sh: no such file"),
        ("ddp", Options({}, {}, ("gone.py",)), None, "gone.py: no such file"),
        # Errors that would otherwise appear only after the job has waited for its nodes.
        (
            "ddp",
            Options({}, {}, ("python", "train.py")),
            None,
            "python: no such file from here.*without 'python'",
        ),
        ("bench", Options({}, {}, ("gone",)), None, "name of a benchmark.*collectives"),
        ("test", Options({}, {}, ("train.py",)), None, "takes no program; got train.py"),
        ("array", Options({}), None, "a file of arguments"),
        ("array", Options({}, {}, ("train.py", "gone.py")), None, "gone.py: no such file"),
        ("couple", Options({}, {}, ("train.py",)), None, "several programs"),
        ("couple", Options({}, {}, ("train.py", ":", "gone.py")), None, "gone.py: no such file"),
        (
            "couple",
            Options({}, {}, ("-n", "3", "train.py", ":", "-n", "2", "train.py")),
            None,
            "need 5 ranks .*, and the job has 4",
        ),
        (
            "couple",
            Options({"ntasks": "2"}, {}, ("-n", "2", "train.py", ":", "train.py")),
            None,
            "need 3 ranks .*, and the job has 2",
        ),
        ("ddp", Options({}, {"MPIDIST_GPU_PER_NODE": "2"}), None, "is MPIDIST_GPUS_PER_NODE meant"),
        ("ddp", Options({}), Path("crlf.sh"), "crlf.sh has the line ends of Windows"),
        ("ddp", Options({}), Path("binary.sh"), "binary.sh is no text"),
    ],
)
def test_what_is_not_there_is_named(site, name, options, env, words):
    with pytest.raises(LaunchError, match=words):
        job_plan.planned(name, options, env, {})


def test_programs_of_one_job_have_absolute_paths(site):
    arguments = ("-n", "1", "train.py", "--grid", "a b", ":", "sim", "train.py")
    modules = {"MPIDIST_MODULES": "sim/5"}
    text = job_plan.planned("couple", Options({}, modules, arguments), None, {}).text
    here = site / "here"
    assert f"\nset -- -n 1 {here}/train.py --grid 'a b' :: sim train.py\n" in text
    text = job_plan.planned("couple", Options({}, {}, ("-n", "2", "--steps", "5")), None, {}).text
    assert "\nset -- -n 2 --steps 5\n" in text
    image = {"MPIDIST_IMAGE": "x.sif"}
    text = job_plan.planned(
        "couple", Options({}, image, ("/x", ":", "-n", "1", "y")), None, {}
    ).text
    assert "\nset -- /x : -n 1 y\n" in text


def test_only_programs_beside_others_may_be_more_ranks_than_gpus(site):
    header = {"ntasks-per-node": "3", "gpus-per-node": "1"}
    programs = ("-n", "2", "sim", "::", "train.py")
    modules = {"MPIDIST_MODULES": "sim/5"}
    plan = job_plan.planned("couple", Options(header, modules, programs), None, {})
    assert "#SBATCH --ntasks-per-node=3" in plan.text and "--gpus-per-node=1" in plan.text
    assert not any("unused" in note for note in plan.notes)
    with pytest.raises(LaunchError, match="3 ranks and 1 GPUs on a node"):
        job_plan.planned("ddp", Options(header, {}, ("train.py",)), None, {})


def test_a_number_that_is_no_ascii_is_refused_like_any_word(site):
    with pytest.raises(ValueError, match="TYPE:NUMBER"):
        job_plan.planned("ddp", Options({"gpus-per-node": "²"}), None, {})


def test_settings_and_arguments_that_are_no_files_here_go_on_as_they_are(site):
    settings = {
        "UCX_NET_DEVICES": "mlx5_1:1",
        "MPIDIST_CHECKPOINT": "old",
        "MPIDIST_IMAGE": "x.sif",
    }
    text = job_plan.planned("ddp", Options({}, settings, ("/app/train.py",)), None, {}).text
    assert "\nset -- /app/train.py\n" in text and "\nexport UCX_NET_DEVICES=mlx5_1:1\n" in text
    text = job_plan.planned("bench", Options({}, {}, ("collectives",)), None, {}).text
    assert "\nset -- collectives\n" in text


def test_this_environment_is_the_jobs_unless_the_site_names_one():
    assert job_plan.environment_of({}, "/venv", "/usr") == {"MPIDIST_VENV": "/venv"}
    assert job_plan.environment_of({}, "/usr", "/usr") == {}
    for taken in ({"MPIDIST_VENV": "$HOME/x"}, {"MPIDIST_IMAGE": "x.sif"}):
        assert job_plan.environment_of(taken, "/venv", "/usr") == {}


CLUSTER = parse(
    "cpu*|up|10|64|2|32|192000|(null)|1-00:00:00\n"
    "gpu|up|4|32|2|16|1|gpu:a100:2|infinite\n"
    "old|down|1|8|1|8|1|(null)|infinite\n"
)


def headers(plan):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", plan.text, re.MULTILINE))


def test_numbers_left_out_are_the_partitions_and_are_told(site):
    plan = job_plan.planned("ddp", Options({"partition": "gpu"}), None, {}, CLUSTER)
    found = headers(plan)
    assert (found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "2")
    assert "export MPIDIST_GPUS_PER_NODE=2" in plan.text
    assert plan.notes[0].startswith("2 nodes; on each 2 ranks of 1 CPU, 2 GPUs (--nodes, ")
    assert plan.notes[1] == "partition gpu (4 nodes of 32 CPUs and 2 GPUs a100)"
    # The default partition, without GPUs: a rank for each socket.
    plan = job_plan.planned("ddp", Options({}), None, {}, CLUSTER)
    found = headers(plan)
    assert "gpus-per-node" not in found and found["ntasks-per-node"] == "2"
    assert "export MPIDIST_GPUS_PER_NODE=0" in plan.text
    # The site's own env.sh is not asked again.
    plan = job_plan.planned("ddp", Options({}), Path("env.sh"), {}, CLUSTER)
    assert headers(plan)["gpus-per-node"] == "2"


def test_a_job_above_a_limit_is_refused_with_the_partition_and_the_option(site):
    short = replace(CLUSTER["old"], limit_s=3600)
    cluster = {**CLUSTER, "old": replace(short, memory=MemoryLimits(most_per_node=64000))}

    def planned(environ=None, **header):
        return job_plan.planned("ddp", Options(header), None, environ or {}, cluster)

    words = r"partition cpu \(10 nodes of 64 .*: --time 2-0 is above its limit: at most --time 1440"
    with pytest.raises(LaunchError, match=words):
        planned(time="2-0")
    with pytest.raises(LaunchError, match=r"partition old .*; partition cpu "):
        planned(time="2-0", partition="old,cpu")
    # One partition of several is enough; what sbatch reads from the environment counts.
    assert planned(time="2-0", partition="old,gpu")
    for environ, words in [
        ({"SBATCH_PARTITION": "old", "SBATCH_TIMELIMIT": "90"}, "partition old .*--time 60"),
        ({"SBATCH_PARTITION": "old", "SBATCH_MEM_PER_NODE": "200G"}, "64000M: --mem 64000M"),
    ]:
        with pytest.raises(LaunchError, match=words):
            planned(environ)
    assert planned(environ, **{"mem-per-cpu": "1G"})


def test_what_the_partition_makes_of_a_job_is_said(site):
    def notes(partitions, **header):
        return " | ".join(job_plan.planned("ddp", Options(header), None, {}, partitions).notes)

    assert "nothing is taken from a partition: sinfo was not found" in notes(None)
    alone = {"gpu": CLUSTER["gpu"]}
    for where in ({}, {"partition": "gone"}):
        assert "nothing is taken from a partition: no known one is given" in notes(alone, **where)
    assert "taken" not in notes(CLUSTER)
    assert "partition old starts no jobs at present" in notes(CLUSTER, partition="old")
    assert "2 ranks, where the script alone starts 4: the partition has no more" in notes(
        {"one": replace(CLUSTER["cpu"], kinds=[NodeKind(1, 8, 2)])}
    )
    few = replace(CLUSTER["cpu"], memory=MemoryLimits(default_per_cpu=2048))
    assert "partition cpu gives 4 GiB on a node: --mem for more" in notes({"cpu": few})
    assert "--mem for more" not in notes({"cpu": few}, mem="4G")
    few = replace(CLUSTER["cpu"], memory=MemoryLimits(most_per_cpu=2048))
    text = notes({"cpu": few}, mem="80G", **{"cpus-per-task": "2", "ntasks-per-node": "2"})
    assert (
        "2048M for each CPU: the job takes, and pays for, 40 CPUs of a node in place of 4" in text
    )
    assert "1 GPU of each node stays unused" in notes(
        CLUSTER, partition="gpu", **{"gpus-per-node": "2", "ntasks-per-node": "1"}
    )


def test_every_shipped_script_can_be_rendered():
    for name in job_plan.names():
        if name == "rpc-het":
            with pytest.raises(
                ValueError, match="heterogeneous job has a header for each component"
            ):
                job_plan.planned(name, Options({"nodes": "2"}), None, {})
            continue
        arguments = (__file__,) if name == "array" else ()
        text = job_plan.planned(
            name, Options({"nodes": "2", "time": "10"}, {}, arguments), None, {}
        ).text
        assert "#SBATCH --nodes=2" in text and "#SBATCH --time=10" in text
        assert not re.search(r"^#SBATCH", text.split("set -", 1)[1], re.MULTILINE), name
        done = subprocess.run(
            ["bash", "-n"], input=text, text=True, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
