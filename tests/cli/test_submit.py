"""Submission of job scripts: shipped scripts, site values, the call of sbatch."""

import re
import subprocess
from pathlib import Path

import pytest

from mpidist import shipped
from mpidist.cli import submit
from mpidist.cli.job_script import Options
from mpidist.errors import LaunchError

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
    for name in ("array", "bench", "ddp", "test"):
        (scripts / f"{name}.sbatch").write_text(_DDP)
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
    text, filled = submit.text_of(
        "ddp", Options({"nodes": "2"}, {}, ("train.py", "--epochs", "3")), Path("env.sh"), {}
    )
    lines = text.splitlines()
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
    assert filled.header["ntasks-per-node"] == "2"


def test_no_gpus_and_ranks_of_ones_own(site):
    text, _ = submit.text_of("ddp", Options({"gpus-per-node": "0"}), None, {})
    assert (
        "gpus-per-node" not in text
        and "#SBATCH --ntasks-per-node=4" in text
        and "MPIDIST_GPUS_PER_NODE=0" in text
    )
    text, _ = submit.text_of(
        "ddp", Options({"gpus-per-node": "a100:2", "ntasks-per-node": "8"}), None, {}
    )
    assert "#SBATCH --gpus-per-node=a100:2" in text and "#SBATCH --ntasks-per-node=8" in text
    text, _ = submit.text_of(
        "ddp",
        Options({}, {"MPIDIST_GPUS_PER_NODE": "1"}),
        None,
        {"MPIDIST_SLURM": str(site / "here")},
    )
    assert "#SBATCH --gpus-per-node=1" in text and "#SBATCH --account=mine" in text


@pytest.mark.parametrize(
    ("name", "options", "env", "words"),
    [
        ("gone", Options({}), None, "no job script gone: array, bench, ddp"),
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
        ("ddp", Options({}, {"MPIDIST_GPU_PER_NODE": "2"}), None, "is MPIDIST_GPUS_PER_NODE meant"),
        ("ddp", Options({}), Path("crlf.sh"), "crlf.sh has the line ends of Windows"),
        ("ddp", Options({}), Path("binary.sh"), "binary.sh is no text"),
    ],
)
def test_what_is_not_there_is_named(site, name, options, env, words):
    with pytest.raises(LaunchError, match=words):
        submit.text_of(name, options, env, {})


def test_a_number_that_is_no_ascii_is_refused_like_any_word(site):
    with pytest.raises(ValueError, match="TYPE:NUMBER"):
        submit.text_of("ddp", Options({"gpus-per-node": "²"}), None, {})


def test_settings_and_arguments_that_are_no_files_here_go_on_as_they_are(site):
    settings = {
        "UCX_NET_DEVICES": "mlx5_1:1",
        "MPIDIST_CHECKPOINT": "old",
        "MPIDIST_IMAGE": "x.sif",
    }
    text, _ = submit.text_of("ddp", Options({}, settings, ("/app/train.py",)), None, {})
    assert "\nset -- /app/train.py\n" in text and "\nexport UCX_NET_DEVICES=mlx5_1:1\n" in text
    text, _ = submit.text_of("bench", Options({}, {}, ("collectives",)), None, {})
    assert "\nset -- collectives\n" in text


def test_this_environment_is_the_jobs_unless_the_site_names_one():
    assert submit.environment_of({}, "/venv", "/usr") == {"MPIDIST_VENV": "/venv"}
    assert submit.environment_of({}, "/usr", "/usr") == {}
    for taken in ({"MPIDIST_VENV": "$HOME/x"}, {"MPIDIST_IMAGE": "x.sif"}):
        assert submit.environment_of(taken, "/venv", "/usr") == {}


def test_sbatch_gets_the_text_and_its_status_is_passed_on(site, monkeypatch, capfd):
    sbatch = site / "sbatch"
    sbatch.write_text('#!/bin/bash\necho "$SBATCH_ACCOUNT|$SBATCH_QOS|$(cat)"\nexit 3\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{site}:/bin:/usr/bin")
    monkeypatch.setenv("SBATCH_ACCOUNT", "other")
    monkeypatch.setenv("SBATCH_QOS", "low")
    assert submit.submit("a job", Options({"account": "mine"})) == 3
    assert capfd.readouterr().out == "|low|a job\n"
    monkeypatch.setenv("PATH", str(site / "here"))
    with pytest.raises(LaunchError, match=r"sbatch was not found.*--dry-run"):
        submit.submit("a job", Options({}))


def test_every_shipped_script_can_be_rendered():
    for name in submit.names():
        if name == "rpc-het":
            with pytest.raises(
                ValueError, match="heterogeneous job has a header for each component"
            ):
                submit.text_of(name, Options({"nodes": "2"}), None, {})
            continue
        arguments = (__file__,) if name == "array" else ()
        text, _ = submit.text_of(
            name, Options({"nodes": "2", "time": "10"}, {}, arguments), None, {}
        )
        assert "#SBATCH --nodes=2" in text and "#SBATCH --time=10" in text
        assert not re.search(r"^#SBATCH", text.split("set -", 1)[1], re.MULTILINE), name
        done = subprocess.run(
            ["bash", "-n"], input=text, text=True, capture_output=True, timeout=20, check=False
        )
        assert done.returncode == 0, done.stderr
