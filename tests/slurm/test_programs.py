"""Command line of several programs: its parts, their ranks, what the job script reads."""

import shlex

import pytest

from mpidist import shipped
from mpidist.errors import LaunchError
from mpidist.slurm import programs
from mpidist.slurm.programs import Program, absolute, command, divided, located, parse


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a program of Python, an executable and a text, one below it."""
    folder = tmp_path / "two words"
    folder.mkdir()
    for path in (tmp_path / "train.py", folder / "sim", tmp_path / "notes.txt"):
        path.write_text("")
    (folder / "sim").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ranks(line, size):
    return [program.ranks for program in divided(parse(line.split()), size)]


def test_programs_are_divided_by_colons_and_one_has_the_ranks_that_are_left():
    assert parse(["-n", "2", "./sim", "-n", "3", "::", "-m", "train", "--x", "a b"]) == [
        Program(2, ("./sim", "-n", "3")),
        Program(None, ("-m", "train", "--x", "a b")),
    ]
    for line, size, expected in (
        ("-n 1 a : b", 3, [1, 2]),
        ("a : -n 3 b", 4, [1, 3]),
        ("-n 1 a :: b :: -np 1 c", 5, [1, 3, 1]),
        # Some ranks of the job stay unused.
        ("-n 1 a : -n 2 b", 4, [1, 2]),
    ):
        assert ranks(line, size) == expected


def test_without_programs_the_example_has_the_arguments():
    example = str(shipped.folder("examples") / "coupled_heat.py")
    for line, simulating, more in (
        ("", 1, ()),
        ("--steps 50", 1, ("--steps", "50")),
        ("-n 2 --steps 50", 2, ("--steps", "50")),
    ):
        first, second = parse(line.split())
        assert first == Program(simulating, (example, "simulate"))
        assert second == Program(None, (example, "train", *more))
        assert absolute(line.split()) == tuple(line.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "train.py --epochs 3",
            "several programs, with '::' between.*train.py alone, which the script ddp takes",
        ),
        ("-n 1 train.py", "several programs"),
        ("-m train", "several programs"),
        (": train.py", "a program is missing beside '::'"),
        ("-n 1 : train.py", "a program is missing"),
        ("sim : : train.py", "a program is missing"),
        ("sim : --epochs 3", "stands before its arguments; got --epochs"),
        ("-m : train.py", "stands before its arguments; got -m"),
        ("-n 0 sim : train.py", "1 or more; got '0'"),
        ("sim : -n two train.py", "got 'two'"),
        ("-n", "got ''"),
        ("-n ² sim : train.py", "got '²'"),
        ("sim : train.py", "one program alone can have the ranks .* -n for train.py"),
        ("-n 4 sim : train.py", r"need 5 ranks \(4 for sim, at least 1 for train.py\).* has 4"),
        ("-n 3 sim : -n 2 -m train", r"need 5 ranks \(3 for sim, 2 for train\), and the job"),
        ("-n 4 --steps 3", "need 5 ranks"),
    ],
)
def test_a_wrong_command_line_is_refused(line, words):
    with pytest.raises(LaunchError, match=words):
        ranks(line, 4)


def test_a_line_end_is_refused():
    with pytest.raises(LaunchError, match="line end"):
        parse(["sim", "a\nb", ":", "train.py"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("train.py",), ""),
        (("two words/sim",), ""),
        (("-m", "no.module"), ""),
        (("sh", "-c", "true"), ""),
        (("gone.py",), "gone.py: no such file from here"),
        (("./gone",), "./gone: no such file from here"),
        (("two words",), "two words: no such file here, and no such command"),
        (("no-such-command",), "no such command on PATH"),
        (("notes.txt",), "neither executable"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_program_is_here_or_named(words, problem):
    program = Program(1, words)
    if problem:
        with pytest.raises(LaunchError, match=problem):
            programs.require_found(program)
    else:
        programs.require_found(program)
    if "command" in problem:
        programs.require_found(program, has_modules=True)


def test_the_interpreter_runs_python_and_a_container_all(here):
    image = ("apptainer", "exec", "x.sif", "python3")
    for words, alone, contained in (
        (("train.py", "-x"), ("/py", "train.py", "-x"), (*image, "train.py", "-x")),
        (("-m", "train"), ("/py", "-m", "train"), (*image, "-m", "train")),
        (("./sim", "-x"), ("./sim", "-x"), (*image[:-1], "./sim", "-x")),
    ):
        assert command(Program(1, words), ("/py",)) == alone
        assert command(Program(1, words), image) == contained
    line = ("-n", "1", "two words/sim", "train.py", "::", "train.py")
    expected = ("-n", "1", f"{here}/two words/sim", "train.py", "::", f"{here}/train.py")
    assert absolute(line) == expected
    assert located(Program(1, ("sh",))).words == ("sh",)


def test_the_job_script_reads_ranks_and_shell_words(here, capsys):
    arguments = ["two words/sim", "it's", "$HOME", '"q"', "*", ":", "-n", "2", "train.py"]
    assert programs.main(["3", "1", "/the venv/python", *arguments]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["1", f"{here}/two words/sim", "it's", "$HOME", '"q"', "*"],
        ["2", "/the venv/python", f"{here}/train.py"],
    ]
    assert programs.main(["3", "1", "python", "sim", ":", "gone.py"]) == 2
    assert programs.main(["3", "1", "python", "-n", "3", "sh", ":", "gone.py"]) == 2
    assert programs.main(["3", "1", "python", "sh", ":", "-n", "1", "gone.py"]) == 2
    out, told = capsys.readouterr()
    assert not out and "mpidist: gone.py: no such file from here" in told
