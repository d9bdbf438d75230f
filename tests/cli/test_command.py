"""The ``mpidist`` command line: help, examples, errors, missing packages."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.main import get_command

import mpidist
from mpidist import shipped
from mpidist.cli import app as cli
from mpidist.cli import command, doctor, run
from mpidist.cli.finding import PROBLEM, WARNING, Finding
from mpidist.comm.mpi import job_folder
from mpidist.errors import LaunchError
from mpidist.trace import chrome_file
from tests.cli.test_findings import alone, job
from tests.tools.support import ROOT, started
from tests.trace.made import facts


def test_every_help_has_examples_that_parse(call):
    names = set(get_command(cli.app).commands)
    assert names == set(cli.EXAMPLES)
    for name, examples in cli.EXAMPLES.items():
        shown = re.sub(r"\s+", " ", call(name, "--help").output)
        for example in examples:
            assert example in shown, f"{name}: {example!r} is not whole in its help"
            words = shlex.split(example)
            words = words[words.index("mpidist") + 1 :]
            assert words[0] == name
            group = get_command(cli.app)
            with group.commands[name].make_context(name, words[1:]) as context:
                assert context.info_name == name
    assert (
        "mpidist run -n 4 train.py" in call("--help").output
        and "--install-completion" in call("--help").output
    )


def test_command_lines_are_planned(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # mpirun forwards mpidist's variables to other hosts by name.
    for name in [name for name in os.environ if name.startswith("MPIDIST_")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    python = sys.executable
    start = "/m/bin/mpirun -n 4 --bind-to"
    cases = {
        "run -n 4 --dry-run train.py -n 3": f"{start} none {python} train.py -n 3",
        "run --bind-to core --tag-output --ft -n 4 --dry-run -m a.b": f"{start} core --output tag "
        f"--with-ft ulfm {python} -m a.b",
        "run -n 4 --hosts a,b --dry-run sh": f"{start} none --host a,b -x OMP_NUM_THREADS sh",
        "tune --device cpu -n 4 --dry-run --rounds 3": f"{start} none {python} -m mpidist.tune "
        "--device cpu --rounds 3",
    }
    for line, expected in cases.items():
        done = call(*shlex.split(line))
        assert (done.exit_code, done.stdout) == (0, f"{expected}\n"), line
    done = call("bench", "kernels", "--output", "out", "--dry-run", "--", "--quick")
    assert re.fullmatch(
        rf"/m/bin/mpirun -n 1 --bind-to none {python} .*/bench_kernels.py --quick --output "
        rf"{tmp_path}/out\n",
        done.stdout,
    )
    assert call("--version").stdout == f"{mpidist.__version__}\n"


def test_what_cannot_be_done_ends_with_status_2_and_words(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line, words in [
        ("run train.py", "train.py: no such file"),
        ("run sh", "number of ranks is not given"),
        ("run -n 0 sh", "--ranks"),
        ("run --rank 2 sh", "--rank is no option of mpidist run"),
        ("run -n 2 --bind-to moon sh", "moon"),
        ("bench nothing", "nothing"),
        ("bench ddp --quick", "No such option"),
        ("submit ddp --time 1h --dry-run", "--time takes"),
        ("submit nothing --dry-run", "no job script nothing"),
        ("submit ddp --set X --dry-run", "--set takes NAME=VALUE; got 'X'"),
        ("submit ddp --nodes 0 --dry-run", "--nodes must be a positive number"),
        ("nothing", "No such command"),
        ("doctor --timeout inf", "--timeout"),
    ]:
        if line.startswith("submit ddp"):
            monkeypatch.setattr(shipped, "folder", lambda name: tmp_path)
            (tmp_path / "ddp.sbatch").write_text(
                '#!/bin/bash\n#SBATCH --nodes=1\nsource "$MPIDIST_SLURM/env.sh"\n'
            )
            (tmp_path / "env.sh").write_text("")
        done = call(*shlex.split(line))
        assert done.exit_code == 2 and words in done.stderr, f"{line}: {done.output} {done.stderr}"
        assert "Traceback" not in done.output


def test_doctors_report_is_printed_plainly_and_written(call, monkeypatch, tmp_path):
    found = [Finding(PROBLEM, (1,), "it [breaks]", "mend it"), Finding(WARNING, (), "slow", "")]
    reports = {
        "problem": (doctor.Report(job(), found, True), 1, 1),
        "warning": (doctor.Report(job(), found[1:], True), 0, 1),
        "fine": (doctor.Report(alone(), [], True), 0, 0),
        "no mpi": (doctor.Report([replace(alone()[0], mpi=None)], found[:1], True), 1, 1),
        "another rank's": (doctor.Report(job(), found, False), 1, 1),
        "no mpi on another rank": (
            doctor.Report([replace(alone()[0], rank=3, mpi=None, problem="why")], found, False),
            1,
            1,
        ),
    }
    for name, (report, status, strict_status) in reports.items():
        monkeypatch.setattr(doctor, "examine", lambda *args, report=report: report)
        done = call("doctor")
        assert (done.exit_code, call("doctor", "--strict").exit_code) == (status, strict_status), (
            name
        )
        assert "\x1b" not in done.output
        assert ("it [breaks]" in done.output) == (name in ("problem", "no mpi")), done.output
        assert (done.stdout == "") == name.endswith(("another rank's", "another rank")), name
        assert (done.stderr == "[rank 3] mpidist doctor: why\n") == (
            name == "no mpi on another rank"
        )
    monkeypatch.setattr(doctor, "examine", lambda *args: reports["problem"][0])
    assert call("doctor", "--json", str(tmp_path / "gone" / "found.json")).exit_code == 2
    call("doctor", "--json", str(tmp_path / "found.json"))
    data = json.loads((tmp_path / "found.json").read_text())
    assert (data["problems"], data["warnings"], data["notes"], len(data["ranks"])) == (1, 1, 0, 4)
    assert data["ranks"][3]["mpi"]["transports"]["component"] == "ucx"
    assert "(rank 1)" in call("doctor").output and "1 problem, 1 warning" in call("doctor").output


def test_without_typer_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and "pip install 'mpidist[cli]'" in capsys.readouterr().err


def test_ctrl_c_while_the_command_is_imported_has_no_traceback(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.importlib.util, "find_spec", interrupted)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130


def test_an_output_that_cannot_be_written_has_no_traceback():
    """Of a reader that has enough, as head, and of a full disk."""
    for line, unbuffered in (
        ("--version", ""),
        ("submit ddp --dry-run", ""),
        ("submit ddp --dry-run", "1"),
    ):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "wb") as closed, open("/dev/full", "wb") as full:
            for file in (closed, full):
                done = subprocess.run(
                    [sys.executable, "-m", "mpidist", *line.split()],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=60,
                    check=False,
                )
                said = done.stderr
                assert done.returncode == (1 if file is closed else 2), (line, said)
                assert ("No space left" in said) == (file is full), (line, said)
                for word in ("Traceback", "ignored", "Broken pipe"):
                    assert word not in said, (line, said)


def test_a_closed_output_is_no_error(tmp_path):
    """As of a job in the background that was started with >&-."""
    own = tmp_path / "own.json"
    with chrome_file.written(own) as file:
        file.begin(facts(1))
    line = shlex.join([sys.executable, "-m", "mpidist", "trace", "summary", str(own)])
    done = started(["sh", "-c", f"{line} >&-"], 60)
    assert (done.returncode, done.stderr) == (0, "")


def test_clean_names_what_it_removes_and_what_it_leaves(call, tmp_path, monkeypatch):
    dead, used = (tmp_path / f"mpidist-{os.geteuid()}-{name}" for name in ("a", "b"))
    dead.mkdir()
    monkeypatch.setattr(job_folder, "MEMORY", tmp_path)
    job = job_folder.JobFolder(used)
    job.open()
    done = call("clean")
    assert (done.exit_code, done.output) == (
        0,
        f"removed {dead}\nleft {used}, which a process uses\n",
    )
    job.close(0)
    assert call("clean").output == "" and not list(tmp_path.iterdir())


def test_errors_of_ours_have_no_traceback(call, monkeypatch):
    def fails(*args):
        raise LaunchError("no MPI anywhere")

    monkeypatch.setattr(run, "site", fails)
    done = call("run", "-n", "2", "sh")
    assert (done.exit_code, done.stderr) == (2, "mpidist: no MPI anywhere\n")


@pytest.mark.slow
def test_help_starts_and_restarts_come_without_torch():
    """Importing torch from a cold file system takes minutes on a login node."""
    code = "import sys\nfrom mpidist.cli.app import app\nfrom mpidist.cli import restarts, run\n"
    code += "from mpidist.checkpoint import slots\ntry:\n    app(['run', '--help'])\n"
    code += "except SystemExit:\n    print('torch' in sys.modules)"
    done = started([sys.executable, "-c", code], 60)
    assert done.stdout.endswith("False\n"), done.stdout + done.stderr


def test_options_of_a_program_without_the_dashes_are_explained(call):
    done = call("submit", "ddp", "train.py", "--epochs", "3")
    text = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and "No such option: --epochs" in text
    assert "stand behind --: mpidist submit ... -- train.py --epochs 3" in text
    done = call("bench", "ddp", "--quick")
    text = " ".join(done.output.replace("│", " ").split())
    assert "stand behind --: mpidist bench ... -- --quick" in text
    done = call("submit", "ddp", "--nods", "2", "--", "train.py")
    assert done.exit_code == 2 and "stand behind" not in done.output


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("mpidist su", "submit"),
        ("mpidist submit d", "ddp"),
        ("mpidist submit rpc", "rpc"),
        # Nothing of its own: the shell proposes files.
        ("mpidist run -n 2 tr", ""),
        ("mpidist submit ddp -- tr", ""),
    ],
)
def test_a_shell_completes_names_and_leaves_programs_to_its_files(line, proposed):
    words = line.split()
    environ = {
        "_MPIDIST_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = started([sys.executable, "-m", "mpidist"], 60, environ)
    assert done.stdout.split() == proposed.split(), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_complete_as_bash_does(shell):
    environ = {
        "_MPIDIST_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "mpidist submit d",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = started([sys.executable, "-m", "mpidist"], 60, environ)
    assert re.findall(r"\w+", done.stdout.split("((")[-1]) == ["ddp"], done.stdout + done.stderr


def test_timelines_are_merged_and_summed_up(call, tmp_path):
    profile = tmp_path / "rank0.json"
    profile.write_text('{"traceEvents": []}')
    done = call("trace", "summary", str(profile))
    assert done.exit_code == 2 and "no trace of mpidist.trace.record" in done.stderr
    done = call("trace", "merge", str(tmp_path / "out.json"), str(profile))
    assert done.exit_code == 2 and "merge needs one trace" in done.stderr
    own = tmp_path / "own.json"
    with chrome_file.written(own) as file:
        file.begin(facts(1))
    assert "node0" in call("trace", "summary", str(own)).stdout
    done = call("trace", "merge", str(tmp_path / "out.json"), str(own), str(profile))
    assert done.exit_code == 0, done.output
