"""Rendering of job scripts; pure."""

import dataclasses
import subprocess

import pytest

from mpidist.slurm.job_script import (
    Options,
    header_of,
    render,
    settings_of,
    site_header,
    validate,
    values_of,
    without_overrides,
)

SCRIPT = """#!/bin/bash
#SBATCH --job-name=mpidist-ddp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --requeue
#SBATCH --time=01:00:00
#
# Training.  source slurm/env.sh; sbatch slurm/ddp.sbatch

set -euo pipefail
MPIDIST_SLURM=${MPIDIST_SLURM:-unset}
source "$MPIDIST_SLURM/env.sh"
source "$MPIDIST_SLURM/job.sh"
printf '%s|' "$MPIDIST_SLURM" "$MPIDIST_VENV" "$@"
"""
OPTIONS = Options({}, folder="/shipped/slurm", env_file="/site/env.sh")


def options(**header):
    return dataclasses.replace(
        OPTIONS, header={name.replace("_", "-"): text for name, text in header.items()}
    )


def test_lines_of_the_header_are_replaced_added_and_taken_out():
    text = render(SCRIPT, options(nodes="2", account="a", gpus_per_node=None, exclusive=""))
    assert header_of(text) == {
        "job-name": "mpidist-ddp",
        "nodes": "2",
        "ntasks-per-node": "4",
        "requeue": "",
        "time": "01:00:00",
        "account": "a",
        "exclusive": "",
    }
    # sbatch reads no header lines after the first command.
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[0] == "#!/bin/bash" and not any(
        line.startswith("#SBATCH") for line in lines[first:]
    )
    assert render(SCRIPT, OPTIONS).count("#SBATCH") == SCRIPT.count("#SBATCH")


def test_a_rendered_script_runs_without_a_path_of_its_own(tmp_path):
    """The text runs from standard input, in another folder and without arguments, as in Slurm."""
    (tmp_path / "env.sh").write_text('MPIDIST_VENV="of env.sh"\n')
    (tmp_path / "job.sh").write_text("")
    made = Options(
        {},
        {"MPIDIST_VENV": "it's ours"},
        ("/x/train.py", "--name", "two words", "$HOME"),
        str(tmp_path),
        str(tmp_path / "env.sh"),
    )
    done = subprocess.run(
        ["bash"],
        input=render(SCRIPT, made),
        text=True,
        capture_output=True,
        cwd="/",
        timeout=60,
        env={"PATH": "/bin:/usr/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}|it's ours|/x/train.py|--name|two words|$HOME|"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        *(
            ({"time": text}, "--time takes")
            for text in ("1h", "1:2:3:4", "0", "00:00:00", "1:99", "", "-1")
        ),
        *(
            ({"nodes": text}, "positive number")
            for text in ("0", "-1", "two", "1.5", "", "²", "２")
        ),
        ({"cpus-per-task": "0"}, "positive number"),
        *(({"gpus-per-node": text}, "TYPE:NUMBER") for text in ("many", "²", "a100:４")),
        *(({"array": text}, "--array takes") for text in ("a", "1-", "1-3%", "%4", "１")),
        *(({key: "64 G"}, f"--{key} takes") for key in ("mem", "mem-per-cpu", "mem-per-gpu")),
        ({"mem": "half"}, "--mem takes"),
        ({"account": "two words"}, "one word"),
        ({"job-name": "a\n#SBATCH --x"}, "one word"),
        *(({"job-name": f"a{char}b"}, "one word") for char in "\x00\x1b\x7f"),
        *(
            ({key: "5\n"}, words)
            for key, words in (("job-name", "one word"), ("time", "--time"), ("array", "--array"))
        ),
        ({"Bad_key": "1"}, "long options"),
    ],
)
def test_values_that_sbatch_would_refuse_are_refused_before(header, words):
    with pytest.raises(ValueError, match=words):
        validate(dataclasses.replace(OPTIONS, header=header))


def test_values_that_sbatch_takes():
    for text in (
        "30",
        "30:00",
        "1:00:00",
        "01:00:00",
        "2-0",
        "1-12",
        "1-12:30",
        "1-12:30:15",
        "UNLIMITED",
    ):
        validate(options(time=text))
    for text in ("0", "64000", "64G", "1t", "512MB"):
        validate(options(mem=text))
    for text in ("0-7", "1,3,5", "0-99%4", "0-8:2", "5"):
        validate(options(array=text))
    validate(options(gpus_per_node="a100:4", nodes="2", qos="low", requeue=""))
    for wrong, words in [
        ({"settings": {"A-B": "1"}}, "--set takes"),
        ({"settings": {"A\n": "1"}}, "--set takes"),
        ({"folder": "slurm"}, "absolute"),
        ({"env_file": ""}, "absolute"),
    ]:
        with pytest.raises(ValueError, match=words):
            validate(dataclasses.replace(OPTIONS, **wrong))


def test_what_is_no_job_script_is_refused():
    with pytest.raises(ValueError, match="begins with"):
        render("echo\n", OPTIONS)
    with pytest.raises(ValueError, match="sources env"):
        render("#!/bin/bash\necho\n", OPTIONS)


def test_the_sites_values_become_header_lines_and_back():
    env = """# values
MPIDIST_ACCOUNT="project1"   # charged
MPIDIST_PARTITION="$WHERE"
export MPIDIST_GPUS_PER_NODE='4'
MPIDIST_MODULES="openmpi/5 cuda"
MPIDIST_VENV="$HOME/venv"
if true; then export SBATCH_X=1; fi
"""
    values = values_of(env)
    assert values == {
        "MPIDIST_ACCOUNT": "project1",
        "MPIDIST_PARTITION": "$WHERE",
        "MPIDIST_GPUS_PER_NODE": "4",
        "MPIDIST_MODULES": "openmpi/5 cuda",
        "MPIDIST_VENV": "$HOME/venv",
    }
    assert site_header(values) == {"account": "project1", "gpus-per-node": "4"}
    assert settings_of({"account": "b", "gpus-per-node": "a100:2", "nodes": "2"}) == {
        "MPIDIST_ACCOUNT": "b",
        "MPIDIST_GPUS_PER_NODE": "2",
    }
    assert settings_of({"gpus-per-node": None}) == {"MPIDIST_GPUS_PER_NODE": "0"}


def test_variables_that_win_over_the_header_are_taken_out():
    environ = {
        "SBATCH_ACCOUNT": "a",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_GPUS_PER_NODE": "4",
        "PATH": "/bin",
    }
    assert without_overrides(environ, {"account": "b", "gpus-per-node": None}) == {
        "SBATCH_TIMELIMIT": "1",
        "PATH": "/bin",
    }
    # sbatch takes one amount of memory.
    assert without_overrides({"SBATCH_MEM_PER_CPU": "1G"}, {"mem": "8G"}) == {}
