"""Job scripts of ``slurm/`` on a real Slurm: artefacts, logs, exit codes, requeued runs.

All jobs are submitted at the beginning and run concurrently; each test waits for its own.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.slurm.conftest import LIMIT_S, Job, Slurm
from tests.tools.support import ROOT

pytestmark = pytest.mark.slurm

MPICH_LIBRARY = ROOT / ".mpich" / "lib" / "libmpi.so.12"
TWO_NODES = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1"
ONE_NODE = "--nodes=1 --ntasks-per-node=2"
ONE_RANK = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1"
EPOCHS = "10"
BENCH = ("--operations", "all_reduce", "--sizes", "8", "--rounds", "2")

# User program that waits for the signal before the time limit, and continues in the next run.
WAITS = """\
import os, signal, sys, time
from mpi4py import MPI
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(True))
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    while not MPI.COMM_WORLD.allreduce(len(got)):
        time.sleep(0.05)
    sys.exit(75)
print("rank", MPI.COMM_WORLD.rank, "of", MPI.COMM_WORLD.size, "goes on")
"""
# User program that trains undisturbed, then again with a rank that is killed behind the commit of
# the eighth step.
KILLED = """\
import json, os
from pathlib import Path
from mpidist import elastic
from tests.elastic.training import Training, dies_at
for name, deaths in (("undisturbed", {}), ("killed", {1: 9})):
    folder = Path(os.environ["MPIDIST_CHECKPOINT"], name)
    folder.mkdir(parents=True, exist_ok=True)
    training = Training("oss", folder, 12, dies_at(deaths, folder))
    found = elastic.run(training)
    print(json.dumps({**found, "run": name, "starts": training.starts}), flush=True)
"""
# User's programs: one sends, in a folder with a blank in its name, and the other receives.
COUPLED = {
    "two words/sends": """\
import sys
import numpy
import mpidist.comm
with mpidist.comm.couple(["sends", "receives"], timeout_s=120) as coupled:
    assert sys.argv[1:] == ["it's", '%t "$HOME"'], sys.argv
    assert coupled.outlet("receives").put(numpy.ones(3), label=7)
""",
    "receives": """\
import mpidist.comm
with mpidist.comm.couple(["sends", "receives"], timeout_s=120) as coupled:
    print("received", [sample.label for sample in coupled.inlet("sends")], coupled.programs)
""",
}
# Replacement of Apptainer for job.sh: logs its arguments and runs the program.
STUB = """\
#!/bin/bash
echo "apptainer $*" >> {log}
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
"""

# (values of env.sh, options of sbatch, words required in the log)
BAD_VALUES = {
    "venv": ({"VENV": "/nowhere"}, "", "MPIDIST_VENV: there is no /nowhere/bin/python on"),
    "no mpidist": (
        {"VENV": "bare"},
        "",
        "'bare/bin/python' cannot import mpidist or load MPI, as it says above",
    ),
    "module": (
        {"MODULES": "openmpi/5"},
        "",
        'MPIDIST_MODULES="openmpi/5", but this node has no command',
    ),
    "launcher": (
        {"MPI": "openmpi"},
        "",
        "MPIDIST_MPI must be auto, pmix, pmi2, cray_shasta or mpirun, not 'openmpi'",
    ),
    "plugin": ({"MPI": "pmix_v1"}, "", "MPIDIST_MPI=pmix_v1 is not among what Slurm offers"),
    "number": (
        {"GPUS_PER_NODE": "two"},
        "--gpus-per-node=0",
        "MPIDIST_GPUS_PER_NODE must be a whole number, not 'two'",
    ),
    "image": ({"IMAGE": "/nowhere.sif"}, "", "MPIDIST_IMAGE: there is no /nowhere.sif"),
    "no gpus": ({}, "--gpus-per-node=0", "submit with --gpus-per-node=2, or edit"),
    "more ranks": (
        {},
        "--ntasks-per-node=3",
        "3 ranks and 2 GPUs on a node: make --ntasks-per-node and --gpus-per-node the same",
    ),
    "hidden": ({}, "--gpu-bind=none", "hide the GPUs of a node from its other ranks"),
}


@pytest.fixture(scope="module")
def sites(slurm: Slurm) -> dict[str, Path]:
    """Return copies of ``slurm/`` with different values."""
    mpich = f"export MPI4PY_LIBMPI={MPICH_LIBRARY}\n"
    apptainer = slurm.folder / "bin" / "apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(STUB.format(log=slurm.work / "apptainer.log"))
    apptainer.chmod(0o755)
    path = f'export PATH="{apptainer.parent}:$PATH"\n'
    image = slurm.folder / "image.sif"
    image.touch()
    bare = slurm.work / "bare" / "bin" / "python"
    bare.parent.mkdir(parents=True)
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    return {
        "mpich": slurm.site("mpich", mpich, GPUS_PER_NODE=1),
        "openmpi": slurm.site("openmpi", GPUS_PER_NODE=0, MAX_REQUEUES="08"),  # no octal number
        "mpirun": slurm.site("mpirun", GPUS_PER_NODE=0, MPI="mpirun"),
        "once": slurm.site("once", GPUS_PER_NODE=0, MAX_REQUEUES=0),
        "restarts": slurm.site("restarts", mpich, GPUS_PER_NODE=0, MAX_RESTARTS=1),
        # One rank of the two has a GPU.
        "coupled": slurm.site("coupled", GPUS_PER_NODE=1),
        "container": slurm.site(
            "container", path, GPUS_PER_NODE=0, IMAGE=image, IMAGE_OPTIONS="--nv --bind /tmp"
        ),
        **{
            name: slurm.site(f"bad-{name.replace(' ', '-')}", **{"GPUS_PER_NODE": 2, **values})
            for name, (values, *_) in BAD_VALUES.items()
        },
    }


@pytest.fixture(scope="module")
def jobs(slurm: Slurm, sites: dict[str, Path]) -> dict[str, Job]:
    """Submit all jobs: first those that wait for Slurm's clock, then the interrupted ones."""
    for name, program in {
        "waits": WAITS,
        "killed": KILLED,
        "fails": "raise SystemExit(3)",
        "saves": "raise SystemExit(75)",
        **COUPLED,
    }.items():
        (slurm.work / f"{name}.py").parent.mkdir(exist_ok=True)
        (slurm.work / f"{name}.py").write_text(program)
    # What the example reads without --data; the import of scikit-learn takes each rank seconds.
    np.savez(digits := slurm.work / "digits.npz", **digits_of_sklearn())
    data = ("--data", digits)
    (slurm.work / "sweep.txt").write_text(
        "".join(f"--seed {seed} --epochs 1 --data {digits}\n" for seed in (1, 2))
    )
    mpich, openmpi = sites["mpich"], sites["openmpi"]
    # Slurm checks every 30 s and signals that much earlier: 10 to 40 s after the start.
    limit = "--time=2 --signal={}USR1@80"
    submitted = {
        "limit": slurm.submit(
            openmpi / "ddp.sbatch", "waits.py", options=f"{ONE_NODE} {limit.format('')}"
        ),
        "limit-mpirun": slurm.submit(
            sites["mpirun"] / "ddp.sbatch", "waits.py", options=f"{TWO_NODES} {limit.format('B:')}"
        ),
        "killed": slurm.submit(
            sites["restarts"] / "ddp.sbatch", "killed.py", options=ONE_NODE, PYTHONPATH=str(ROOT)
        ),
        "signalled": slurm.submit(
            mpich / "ddp.sbatch", *data, "--epochs", EPOCHS, options=TWO_NODES
        ),
        "preempted": slurm.submit(
            openmpi / "ddp.sbatch",
            *data,
            "--epochs",
            EPOCHS,
            options=f"{ONE_NODE} --partition=low",
        ),
        "whole": slurm.submit(mpich / "ddp.sbatch", "--epochs", EPOCHS, options=TWO_NODES),
        "oss": slurm.submit(mpich / "oss.sbatch", *data, "--epochs", "2", options=TWO_NODES),
    }
    submitted["oss-3"] = slurm.submit(
        openmpi / "oss.sbatch",
        *data,
        "--epochs",
        "3",
        options="--nodes=2 --ntasks=3 --ntasks-per-node=2 "
        f"--dependency=afterok:{submitted['oss'].number}",
        MPIDIST_CHECKPOINT=f"checkpoints/mpidist-oss-{submitted['oss'].number}",
    )
    submitted["array"] = slurm.submit(
        openmpi / "array.sbatch", "sweep.txt", options=f"{ONE_RANK} --gpus-per-node=0 --array=1-2"
    )
    # The same through the mpidist command, which renders the shipped script.
    submit = (
        sys.executable,
        "-c",
        "from mpidist.cli.command import main; main()",
        "submit",
        "rpc",
        "--env",
        sites["mpirun"] / "env.sh",
    )
    printed = slurm.command(
        *submit,
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        "--",
        "--steps",
        "50",
    )
    submitted["rpc"] = Job(slurm, re.findall(r"Submitted batch job (\d+)", printed)[0])
    # Sourced values would apply to both components.
    for name, (first, second) in {
        "rpc-het": ("n1", "n2"),
        "rpc-het-unsorted": ("n2", "n1"),
    }.items():
        components = (
            "--cpus-per-task=1",
            f"--nodelist={first}",
            ":",
            "--ntasks-per-node=2",
            "--gpus-per-node=2",
            "--cpus-per-task=1",
            f"--nodelist={second}",
        )
        submitted[name] = Job(
            slurm,
            slurm.command(
                "sbatch", "--parsable", *components, openmpi / "rpc-het.sbatch", "--steps", "50"
            ),
        )
    submitted["bench"] = slurm.submit(
        mpich / "bench.sbatch", "collectives", *BENCH, options=TWO_NODES
    )
    submitted["couple"] = slurm.submit(
        sites["coupled"] / "couple.sbatch",
        *("-n", "1", "two words/sends.py", "it's", '%t "$HOME"', "::", "receives.py"),
        options="--nodes=1 --ntasks-per-node=2 --gpus-per-node=1",
    )
    submitted["test-gpu"] = slurm.submit(mpich / "test.sbatch", options=ONE_RANK)
    # The unedited script of an installation, with values from another folder.
    submitted["container"] = Job(
        slurm,
        slurm.command(
            "sbatch",
            "--parsable",
            "--cpus-per-task=1",
            "--nodes=1",
            "--ntasks-per-node=1",
            "--gpus-per-node=0",
            ROOT / "slurm" / "rpc.sbatch",
            "--steps",
            "50",
            MPIDIST_SLURM=str(sites["container"]),
        ),
    )
    submitted["fails"] = slurm.submit(openmpi / "ddp.sbatch", "fails.py", options=ONE_RANK)
    submitted["once"] = slurm.submit(sites["once"] / "ddp.sbatch", "saves.py", options=ONE_RANK)
    for name, (_, options, _) in BAD_VALUES.items():
        submitted[name] = slurm.submit(
            sites[name] / "ddp.sbatch", options=f"{ONE_NODE} --gpus-per-node=2 {options}"
        )
    interrupt(slurm, submitted)
    return submitted


def digits_of_sklearn() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return {"images": digits.images, "labels": digits.target}


def interrupt(slurm: Slurm, submitted: dict[str, Job]) -> None:
    """Signal one training job, preempt another after a few steps, and restart requeued jobs."""
    due = {
        "signalled": lambda: slurm.command(
            "scancel", "--signal=USR1", submitted["signalled"].number
        ),
        "preempted": lambda: slurm.command(
            "sbatch", "--partition=urgent", "--exclusive", "--output=urgent.out", "--wrap=true"
        ),
    }
    requeued = ["signalled", "preempted", "limit", "limit-mpirun"]
    end = time.monotonic() + LIMIT_S
    while due or requeued:
        for name in [name for name in due if len(losses(slurm, submitted[name])) > 2]:
            due.pop(name)()
        requeued = [name for name in requeued if not submitted[name].start_again_now()]
        assert time.monotonic() < end, {name: submitted[name].fields() for name in requeued}
        time.sleep(0.02)


def losses(slurm: Slurm, job: Job) -> dict[int, float]:
    """Return the losses so far by step."""
    texts = [path.read_text() for path in slurm.work.glob(f"*-{job.number}.jsonl")]
    rows = [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def accuracy(slurm: Slurm, job: Job) -> float:
    (path,) = slurm.work.glob(f"*-{job.number}.jsonl")
    return json.loads(path.read_text().splitlines()[-1])["accuracy"]


def test_a_signalled_job_goes_on_with_the_same_numbers(slurm, jobs):
    job, whole = jobs["signalled"], jobs["whole"]
    assert job.exit_code() == 0 and whole.exit_code() == 0
    assert (
        "state is saved; to be requeued (1 of at most 20 times)" in job.log()
        and job.fields()["Restarts"] == "1"
    )
    assert (
        losses(slurm, job) == losses(slurm, whole)
        and accuracy(slurm, job) == accuracy(slurm, whole) > 0.9
    )


def test_a_preempted_job_goes_on_with_the_same_numbers(slurm, jobs):
    job = jobs["preempted"]
    assert job.exit_code() == 0 and jobs["whole"].exit_code() == 0
    assert "DUE TO PREEMPTION" in job.log() and job.fields()["Restarts"] == "1"
    assert losses(slurm, job) == losses(slurm, jobs["whole"])


def test_killed_ranks_start_again_in_the_allocation_with_the_same_bits(jobs):
    job = jobs["killed"]
    assert job.exit_code() == 0 and job.fields()["Restarts"] == "0", job.log()
    assert "after step 12: start 2 of at most 2" in job.log()
    lines = [json.loads(line) for line in job.log().splitlines() if line.startswith("{")]
    starts = {(line["run"], line["rank"]): line["starts"] for line in lines}
    assert starts == {
        (name, rank): [start]
        for name, start in (("undisturbed", 12), ("killed", 8))
        for rank in range(2)
    }
    assert len({line["digest"] for line in lines}) == 1, lines


def test_a_whole_run_leaves_a_checkpoint_and_its_numbers(slurm, jobs):
    job = jobs["whole"]
    assert job.exit_code() == 0
    assert list((slurm.work / "checkpoints" / f"mpidist-ddp-{job.number}").rglob("manifest.json"))
    assert accuracy(slurm, job) > 0.9 and job.fields()["Restarts"] == "0"
    # The GPU lines have reached Slurm, and Slurm's allocation the ranks' node.
    assert (
        job.fields()["TresPerNode"] == "gres:gpu:1"
        and "GPUs of a node: 1, mpich by 'srun --mpi=pmi2" in job.log()
    )


def test_shards_are_loaded_by_another_number_of_ranks(slurm, jobs):
    assert jobs["oss"].exit_code() == 0 and jobs["oss-3"].exit_code() == 0
    before, after = (losses(slurm, jobs[name]) for name in ("oss", "oss-3"))
    assert min(after) == max(before) + 1 and accuracy(slurm, jobs["oss-3"]) > 0.8


def test_tasks_of_an_array_have_arguments_and_files_of_their_own(slurm, jobs):
    number = jobs["array"].number
    for task, other in ((1, 2), (2, 1)):
        assert Job(slurm, f"{number}_{task}").exit_code() == 0
        log = (slurm.work / f"mpidist-array-{number}_{task}.out").read_text()
        assert f"--seed {task}" in log and f"--seed {other}" not in log
        assert (slurm.work / f"mpidist-array-{number}_{task}.jsonl").exists()
        assert (slurm.work / "checkpoints" / f"mpidist-array-{number}_{task}").is_dir()


@pytest.mark.parametrize("name", ["limit", "limit-mpirun"])
def test_the_time_limit_requeues(jobs, name):
    job = jobs[name]
    assert job.exit_code() == 0 and job.fields()["Restarts"] == "1"
    assert "rank 0 of 2 goes on" in job.log() and "rank 1 of 2 goes on" in job.log()
    most = 8 if name == "limit" else 20
    assert f"requeued (1 of at most {most} times)" in job.log()


def test_unsorted_nodes_of_components_end_the_job_by_pmix(jobs):
    job = jobs["rpc-het-unsorted"]
    assert job.exit_code() == 2, job.log()
    assert "the components' nodes are n2 n1 and Slurm's PMIx plugin needs them sorted" in job.log()
    assert "sbatch --nodelist=FIRST : --nodelist=SECOND" in job.log()


@pytest.mark.parametrize(
    ("name", "trainers", "words"),
    [("rpc", 1, "mpirun"), ("rpc-het", 2, "openmpi by 'srun --mpi=pmix")],
)
def test_servers_and_trainers_are_one_world(jobs, name, trainers, words):
    assert jobs[name].exit_code() == 0, jobs[name].log()
    assert f"{trainers} trainer(s), 50 steps" in jobs[name].log() and words in jobs[name].log()


def test_programs_of_one_job_exchange_tensors(jobs):
    assert jobs["couple"].exit_code() == 0, jobs["couple"].log()
    received = "received [7] {'sends': (0,), 'receives': (1,)}"
    assert received in jobs["couple"].log() and "srun --mpi=pmix" in jobs["couple"].log()


def test_the_benchmark_prints_its_table(slurm, jobs):
    assert jobs["bench"].exit_code() == 0
    assert "all_reduce" in jobs["bench"].log()
    assert json.loads((slurm.work / "results" / "collectives-mpich-2.json").read_text())


def test_the_self_check_names_what_is_wrong(jobs):
    """One that passes is submitted by ``test_api``."""
    # Slurm counts GPUs here that do not exist.
    if not torch.cuda.is_available():
        assert jobs["test-gpu"].exit_code() == 2
        assert (
            "torch sees no GPU on" in jobs["test-gpu"].log()
            and "mpidist: FAIL" in jobs["test-gpu"].log()
        )


def test_programs_run_in_the_container(slurm, jobs):
    assert jobs["container"].exit_code() == 0
    assert "1 trainer(s), 50 steps" in jobs["container"].log()
    started = (slurm.work / "apptainer.log").read_text()
    assert (
        f"exec --nv --bind /tmp {slurm.folder}/image.sif" in started
        and "parameter_server.py --steps 50" in started
    )


def test_a_programs_exit_code_is_the_jobs(jobs):
    assert jobs["fails"].exit_code() == 3 and jobs["fails"].fields()["Restarts"] == "0"
    assert (
        jobs["once"].exit_code() == 75 and "not requeued again after 0 times" in jobs["once"].log()
    )


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_wrong_value_is_named(jobs, name):
    assert jobs[name].exit_code() == 2
    assert BAD_VALUES[name][2] in jobs[name].log()


def test_a_script_without_its_folder_says_so(slurm):
    alone = slurm.work / "alone.sbatch"
    alone.write_text((ROOT / "slurm" / "ddp.sbatch").read_text())
    job = Job(
        slurm,
        slurm.command(
            "sbatch",
            "--parsable",
            "--ntasks-per-node=1",
            "--cpus-per-task=1",
            "--gpus-per-node=0",
            alone,
        ),
    )
    assert job.exit_code() == 2 and "export MPIDIST_SLURM=FOLDER" in job.log()
    refused = slurm.command("sbatch", "--partition=nowhere", alone, check=False)
    assert "invalid partition specified: nowhere" in refused
