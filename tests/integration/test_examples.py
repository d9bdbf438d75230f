"""Shipped examples of RPC and distributed autograd: they run unchanged and learn."""

from __future__ import annotations

import re

import pytest

from tests.tools.support import ROOT, launcher, python, started

pytestmark = pytest.mark.slow


def run(ranks, program, *options):
    command = [*launcher(ranks), *python(), str(ROOT / "examples" / program), *options]
    done = started(command, timeout_s=100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_trainers_find_the_servers_target(ranks):
    text = run(ranks, "parameter_server.py")
    match = re.search(r"(\d) trainer\(s\), 200 steps: loss (\S+),", text)
    assert match and int(match[1]) == max(ranks - 1, 1) and float(match[2]) < 1e-6


@pytest.mark.parametrize("ranks", [3])
def test_actors_win_by_the_learners_policy(ranks):
    text = run(ranks, "actor_learner.py")
    match = re.search(r"(\d) actor\(s\) won (\S+) of their plays; policy \[(.*)\]", text)
    assert match and int(match[1]) == max(ranks - 1, 1)
    # The best arm wins 80 % of its draws, random choice 45 %.
    assert float(match[2]) > 0.65 and float(match[3].split(",")[2]) > 0.9


# A model of byte frequencies alone reaches 3.2.
@pytest.mark.parametrize(
    ("ranks", "steps", "most"),
    [pytest.param(1, 25, 3.2, marks=pytest.mark.long), (3, 60, 2.9)],
)
def test_a_divided_transformer_learns_the_librarys_text(ranks, steps, most):
    text = run(ranks, "pipeline_transformer.py", f"--steps={steps}")
    match = re.search(
        r"(\d) stage\(s\), (\d+) steps: loss (\S+) -> (\S+), on other text (\S+)", text
    )
    assert match and (int(match[1]), int(match[2])) == (ranks, steps)
    first, last, elsewhere = (float(match[number]) for number in (3, 4, 5))
    # The initial loss is log(256) plus the effect of random weights.
    assert 5 < first < 7 and max(last, elsewhere) < most


def test_ranks_that_average_every_50_steps_learn_the_librarys_text():
    text = run(2, "outer_steps.py", "--steps=200")
    match = re.search(r"2 rank.s., 200 steps, averaged every 50: .* (\S+) -> (\S+)", text)
    # The initial loss is log(500); word frequencies alone reach 4.4.
    assert match and 6 < float(match[1]) < 7 and float(match[2]) < 3.9, text


@pytest.mark.parametrize(
    ("ranks", "trainers", "servers", "steps"),
    [pytest.param(1, 1, 1, 60, marks=pytest.mark.long), (4, 2, 2, 100)],
)
def test_trainers_learn_with_tables_on_servers(ranks, trainers, servers, steps):
    text = run(ranks, "embedding_server.py", f"--steps={steps}")
    match = re.search(
        rf"(\d) trainer\(s\), (\d) server\(s\), {steps} steps: loss (\S+) -> (\S+) \((\S+) by",
        text,
    )
    assert match and (int(match[1]), int(match[2])) == (trainers, servers)
    # The initial loss is log(2000); the final one is below that of word frequencies alone.
    assert 7 < float(match[3]) < 8 and float(match[4]) < 4.2 < float(match[5])


def test_trainers_learn_what_another_program_simulates():
    program = [*python(), str(ROOT / "examples" / "coupled_heat.py")]
    for command, trainers in (
        ([*launcher(3), *program], 2),
        ([*launcher(2), *program, "simulate", ":", "-n", "1", *program, "train"], 1),
    ):
        done = started(command, timeout_s=100)
        assert done.returncode == 0, done.stdout + done.stderr
        match = re.search(r"(\d) trainer\(s\), 200 steps: loss (\S+)", done.stdout)
        assert match and int(match[1]) == trainers and float(match[2]) < 1e-3, done.stdout
        sent = [int(count) for count in re.findall(r"(\d+) samples sent", done.stdout)]
        # The trainers' steps, and what they had room for when they left.
        assert 200 * trainers <= sum(sent) <= 202 * trainers + 2 * len(sent)


@pytest.mark.parametrize(
    ("program", "options", "problem"),
    [
        (
            "parameter_server.py",
            ["--steps", "0"],
            "argument --steps: must be a whole number above 0, not 0",
        ),
        (
            "actor_learner.py",
            ["--rounds", "many"],
            "argument --rounds: must be a whole number above 0, not many",
        ),
        ("pipeline_transformer.py", ["--dim", "30"], "--dim 30: no multiple of 4"),
        (
            "embedding_server.py",
            ["--servers", "2"],
            "--servers 2 leaves no trainer among 2 rank(s)",
        ),
        (
            "coupled_heat.py",
            ["--simulating", "2"],
            "--simulating 2 leaves no trainer among 2 process(es)",
        ),
    ],
)
def test_a_wrong_command_line_is_explained_once(program, options, problem):
    done = started(
        [*launcher(2), *python(), str(ROOT / "examples" / program), *options], timeout_s=100
    )
    assert done.returncode != 0
    assert done.stderr.count("usage:") == 1 and done.stderr.count(problem) == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("parameter_server.py", 100),
        ("actor_learner.py", 100),
        ("coupled_heat.py", 110),
        ("outer_steps.py", 100),
        ("pipeline_transformer.py", 150),
        ("embedding_server.py", 150),
    ],
)
def test_examples_are_short(program, lines):
    assert len((ROOT / "examples" / program).read_text().splitlines()) < lines


def test_the_program_of_the_page_about_distributed_autograd(tmp_path):
    (source,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "distributed-autograd.md").read_text(), re.DOTALL
    )
    program = tmp_path / "program.py"
    program.write_text("import torch\ntorch.manual_seed(0)\n" + source)
    done = started([*launcher(2), *python(), str(program)], timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 20 and losses[-1] < losses[0] / 2, losses
