"""Printed report of the doctor: one screen, plain lines, colours on a terminal."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from mpidist.cli import doctor, tables
from mpidist.cli.finding import NOTE, PROBLEM, Finding
from tests.cli.test_findings import alone, job

# The doctor's checks under a launcher and alone.
CHECKS = (
    "two ranks of mpirun",
    "init_process_group and all_reduce on two ranks",
    "all_reduce fp32 sum",
    "all_reduce bf16 average",
    "all_reduce int64 max",
    "all_reduce fp32, asynchronous",
    "all_gather of objects",
    "average in memory of the node",
    "init_process_group and all_reduce",
)


@pytest.mark.parametrize("ranks", [alone(), job()], ids=["one", "four"])
def test_a_fine_report_is_one_screen(ranks):
    settings = {f"UCX_SETTING_{number}": "a long value" for number in range(30)}
    ranks = [
        replace(one, settings=settings, checks=dict.fromkeys(CHECKS, ""), clock_s=1.0)
        for one in ranks
    ]
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    tables.print_report(doctor.Report(ranks, [], True), screen)
    lines = screen.file.getvalue().splitlines()
    # The last line of a terminal is the prompt's.
    assert len(lines) <= 23 and max(map(len, lines)) <= 80, "\n".join(lines)
    assert "everything that was looked at is fine" in lines[-1]
    log = tables.console(io.StringIO())
    tables.print_report(doctor.Report(ranks, [], True), log)
    assert "UCX_SETTING_29" in log.file.getvalue() and "--json" in screen.file.getvalue()


def test_a_remedy_stands_before_its_problem_in_one_line(call, monkeypatch):
    remedy = "srun --mpi=pmix --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python train.py a=1"
    found = [Finding(PROBLEM, (1,), "it breaks", remedy), Finding(NOTE, (), "it is so", "")]
    monkeypatch.setattr(doctor, "examine", lambda *args: doctor.Report(job(), found, True))
    lines = call("doctor").output.splitlines()
    shown = [f"problem (rank 1): {remedy}", "    it breaks", "note: it is so"]
    assert lines[-4:-1] == shown


def test_a_terminal_gets_colours_and_a_rank_does_not(monkeypatch):
    terminal = SimpleNamespace(
        isatty=lambda: True,
        write=lambda text: None,
        flush=lambda: None,
        encoding="utf-8",
        fileno=lambda: 1,
    )
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (
        tables.console(terminal).is_terminal
        and not tables.console(terminal, is_rank=True).is_terminal
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert tables.console(terminal).no_color
