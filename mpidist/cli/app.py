"""Typer subcommands of ``mpidist``: options and their help texts."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from mpidist import progress_bar
from mpidist.cli.bench import RANKS
from mpidist.cli.help_examples import EXAMPLES, epilog
from mpidist.cli.help_pages import (
    BenchCommand,
    Command,
    Group,
    RunCommand,
    SubmitCommand,
    TuneCommand,
)
from mpidist.cli.launch_plan import Plan
from mpidist.cli.launch_request import Request
from mpidist.cli.option_types import (
    Benchmark,
    Binding,
    DryRun,
    DrySubmit,
    EnvFile,
    GpusPerNode,
    JobScript,
    Memory,
    Ranks,
    Sbatch,
    Settings,
    TasksPerNode,
    TimeLimit,
)
from mpidist.errors import MpidistError
from mpidist.file_errors import naming

P = ParamSpec("P")

_STATUS_OF_ERROR = 2
# Options after the program's name, or after --, belong to the program.
_PROGRAM = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
_BEHIND = {"allow_extra_args": True}


def _reporting_errors(call: Callable[P, object]) -> Callable[P, None]:
    """Wrap a command: errors of mpidist end it with their text and status 2, without traceback."""

    @functools.wraps(call)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except BrokenPipeError:
            raise  # of the output, which who reads it has closed
        except (MpidistError, ValueError, OSError) as error:
            print(f"mpidist: {error}", file=sys.stderr)
            raise typer.Exit(_STATUS_OF_ERROR) from None

    return command


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Distributed PyTorch over MPI: look at a machine, start jobs, measure, submit to Slurm.",
    epilog=epilog("mpidist doctor", "mpidist run -n 4 train.py"),
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(importlib.metadata.version("mpidist"))
        raise typer.Exit


def _pass_terminal() -> None:
    """Tell the ranks, which have pipes to the launcher, that their output is a terminal's."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        os.environ.setdefault(progress_bar.VARIABLE, "1")


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="print the version"),
    ] = False,
) -> None:
    pass


@app.command(cls=Command, epilog=epilog(*EXAMPLES["doctor"]))
@_reporting_errors
def doctor(
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="also write all facts and findings there"),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with 1 for a warning, too")
    ] = False,
    timeout: Annotated[
        float,
        # A day: limits of operations become numbers of C.
        typer.Option(
            min=1, max=86400, help="seconds to wait for the other ranks, and for each operation"
        ),
    ] = 20.0,
    launcher: Annotated[
        bool, typer.Option("--launcher/--no-launcher", help="alone: also start two ranks by mpirun")
    ] = True,
) -> None:
    """Look at MPI, devices, cores, memory and versions; say what to do, and what is wrong.

    Alone, with two more ranks that run README's first program and, on a GPU, try what MPI does with
    its memory, which later jobs know then; or under mpirun or srun, on every rank. The exit status
    is 1 if something would stop jobs, else 0.
    """
    from mpidist.cli import doctor as examination
    from mpidist.cli import tables

    report = examination.examine(dict(os.environ), timeout, launcher)
    if report.is_mine:
        tables.print_report(report, tables.console(is_rank=report.ranks[0].tasks is not None))
        if json_file is not None:
            with naming(json_file):
                text = json.dumps(report.as_data(), indent=1) + "\n"
                json_file.write_text(text, encoding="utf-8")
        sys.stdout.flush()
    elif report.ranks[0].problem:
        # Rank 0 may have started MPI and wait for this rank, so this rank prints its own problem.
        print(
            f"[rank {report.ranks[0].rank}] mpidist doctor: {report.ranks[0].problem}",
            file=sys.stderr,
            flush=True,
        )
    raise typer.Exit(report.exit_code(strict))


@app.command(cls=RunCommand, epilog=epilog(*EXAMPLES["run"]), context_settings=_PROGRAM)
@_reporting_errors
def run(
    context: typer.Context,
    ranks: Ranks = None,
    module: Annotated[
        str, typer.Option("-m", metavar="MODULE", help="run a module, as python -m does")
    ] = "",
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes of the Slurm job to use")] = None,
    hosts: Annotated[str, typer.Option(help="outside Slurm: nodes, as a,b or a:4,b:4")] = "",
    hostfile: Annotated[str, typer.Option(help="outside Slurm: file that names the nodes")] = "",
    bind_to: Annotated[
        Binding | None, typer.Option(help="cores of a rank; not bound by mpirun if not given")
    ] = None,
    tag_output: Annotated[
        bool, typer.Option("--tag-output", help="begin each line of output with its rank")
    ] = False,
    ft: Annotated[
        bool, typer.Option("--ft", help="survive the death of ranks (ULFM; Open MPI 5)")
    ] = False,
    heartbeat: Annotated[
        bool,
        typer.Option("--heartbeat", help="with --ft: a process that is stopped for 1 s is dead"),
    ] = False,
    spares: Annotated[
        int,
        typer.Option(
            min=0, help="with --ft: processes more, each for the place of a rank that dies"
        ),
    ] = 0,
    mpi: Annotated[
        str,
        typer.Option(
            metavar="TYPE", help="type of srun --mpi; chosen by the MPI library if not given"
        ),
    ] = "",
    restarts: Annotated[
        int,
        typer.Option(min=0, help="start the ranks again after a failure, if they have saved since"),
    ] = 0,
    dry_run: DryRun = False,
) -> None:
    """Start a Python script, a module or any program on several ranks.

    Inside a Slurm job srun starts them, elsewhere the mpirun of the MPI library that Python loads.
    The exit status is the job's; Ctrl-C and SIGTERM reach it. OMP_NUM_THREADS is 1 unless it is
    set. With --restarts they are started again as often, each time only if a commit or checkpoint
    of mpidist.checkpoint is newer than the last start.
    """
    from mpidist.cli import run as start

    request = Request(
        program=start.program(tuple(context.args), module),
        ranks=ranks,
        nodes=nodes,
        hosts=tuple(filter(None, hosts.split(","))),
        hostfile=hostfile,
        binding=bind_to.value if bind_to else "",
        tags=tag_output,
        ulfm=ft,
        heartbeat=heartbeat,
        spares=spares,
        mpi_type=mpi,
    )
    if not restarts:
        start.start(request, dry_run)
        return
    from mpidist.cli import restarts as again

    status = again.run(request, restarts, dry_run)
    raise typer.Exit(status)


@app.command(cls=BenchCommand, epilog=epilog(*EXAMPLES["bench"]), context_settings=_BEHIND)
@_reporting_errors
def bench(
    context: typer.Context,
    name: Annotated[Benchmark, typer.Argument(metavar="NAME", help="the benchmark; see below")],
    ranks: Ranks = None,
    output: Annotated[Path, typer.Option(help="folder of the JSON and the plots")] = Path(
        "mpidist-bench"
    ),
    dry_run: DryRun = False,
) -> None:
    """Measure: print tables, write JSON and plots. Options behind -- are the benchmark's (--quick).

    Two ranks if not given (kernels: one); inside a Slurm job as many as the job has tasks. The
    ranks are not bound to cores.
    """
    from mpidist.cli import bench as benchmark
    from mpidist.cli import run as start
    from mpidist.cli.launch_request import in_allocation

    program = benchmark.program(name.value, output, context.args)
    if not benchmark.is_job(name.value, context.args):
        if ranks is not None:
            raise ValueError(
                f"{name.value} {context.args[0]} starts its jobs by itself: leave -n out"
            )
        start.become(Plan(start.program(program), {}), dry_run)
        return
    _pass_terminal()
    chosen = ranks or (
        None if in_allocation(os.environ) and "SLURM_NTASKS" in os.environ else RANKS[name.value]
    )
    start.start(Request(start.program(program), ranks=chosen, binding="none"), dry_run)


@app.command(
    cls=TuneCommand,
    epilog=epilog(*EXAMPLES["tune"]),
    context_settings=_BEHIND | {"ignore_unknown_options": True},
)
@_reporting_errors
def tune(context: typer.Context, ranks: Ranks = None, dry_run: DryRun = False) -> None:
    """Measure which all-reduce is the fastest at which size, and keep the table for later jobs.

    One rank per GPU, once per machine. Without -n this process is a rank of the job that mpirun or
    srun has started. --device cuda|cpu, --sizes BYTES and --rounds N go to the measurement
    (mpidist tune -- --help).
    """
    if ranks is None and not dry_run:
        from mpidist import tune as measurement

        raise typer.Exit(measurement.main(context.args))
    from mpidist.cli import run as start

    _pass_terminal()
    program = start.program(tuple(context.args), "mpidist.tune")
    start.start(Request(program, ranks=ranks), dry_run)


@app.command(cls=Command, epilog=epilog(*EXAMPLES["clean"]))
@_reporting_errors
def clean() -> None:
    """Remove the commits and recordings that killed jobs have left in this node's memory.

    A job that still runs keeps its own. The commits are those of mpidist.checkpoint.commit, the
    recordings those that mpidist report reads, and both of this user.
    """
    from mpidist.comm.mpi import job_folder

    removed, used = job_folder.clean()
    for folder in removed:
        print(f"removed {folder}" if not folder.exists() else f"left a part of {folder}")
    for folder in used:
        print(f"left {folder}, which a process uses")
    for line in job_folder.strange_folders():
        print(f"left {line}")


trace = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Timelines of mpidist.trace.record and MPIDIST_TRACE, which ui.perfetto.dev shows.",
    epilog=epilog(*EXAMPLES["trace"]),
)
app.add_typer(trace, name="trace")


@trace.command("merge", cls=Command)
@_reporting_errors
def trace_merge(
    out: Annotated[Path, typer.Argument(help="trace to write; .gz packs it")],
    files: Annotated[
        list[Path],
        typer.Argument(help="one timeline, or its ranks' parts, and traces of torch's profiler"),
    ],
) -> None:
    """Lay traces of torch's profiler (export_chrome_trace) on the clock of a timeline.

    The rank of a profile is in it if torch.distributed was initialized, or by its process; else the
    file's name needs it, as in rank3.json.
    """
    from mpidist.trace import torch_profiles

    for remark in torch_profiles.merge(out, files):
        print(f"mpidist: {remark}", file=sys.stderr)


@trace.command("summary", cls=Command)
@_reporting_errors
def trace_summary(
    file: Annotated[Path, typer.Argument(help="timeline of mpidist.trace.record or MPIDIST_TRACE")],
) -> None:
    """Print late ranks, exposed communication, bandwidths and the longest waits of a timeline.

    last: share of the collectives that the rank entered last. late: median time after the middle
    rank. waited: for the last rank, in all. communicates: share of the time that the main thread
    spent in collectives, messages and calls. tuned: the fastest by mpidist tune's table.
    """
    from mpidist.cli import tables, trace_tables
    from mpidist.trace import summary

    trace_tables.print_summary(summary.read(file), tables.console())


@app.command(cls=Command, epilog=epilog(*EXAMPLES["report"]))
@_reporting_errors
def report(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="name of the job; the newest one's here")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="recordings that were collected from several nodes"),
    ] = None,
    torch: Annotated[
        Path | None,
        typer.Option("--torch", metavar="DIR", help="also write rank_<r> for torchfrtrace there"),
    ] = None,
    stacks: Annotated[
        bool,
        typer.Option("--stacks/--no-stacks", help="ask living ranks for the stacks of all threads"),
    ] = True,
    last: Annotated[int, typer.Option(min=0, help="number of the last operations")] = 20,
) -> None:
    """Say what the ranks of a job on this node did last, who waits for whom, and what for.

    The job may run, hang, or be dead: its files outlive it until mpidist clean removes them. On
    several nodes run it on each, or copy the files of all into one folder. The exit status is 1 if
    something keeps the job.
    """
    from mpidist.cli import report as page
    from mpidist.cli.tables import console
    from mpidist.comm.mpi import job_folder
    from mpidist.reports import findings, job_files

    jobs = job_files.jobs() if folder is None else []
    if folder is None:
        folder = job_files.chosen(job, jobs).folder
    worlds, to, keeps = job_files.read(folder, asks=stacks), console(), False
    for world in worlds:
        found = findings.findings(world)
        keeps |= bool(found)
        page.print_report(world, found, last, to)
    page.print_jobs([each for each in jobs if each.folder != folder], to)
    for line in job_folder.strange_folders():
        print(f"mpidist: not read: {line}", file=sys.stderr)
    if torch is not None:
        from mpidist.reports import flight_recorder

        every = [each for world in worlds for each in world.recordings.values()]
        written = flight_recorder.write_dumps(every, torch)
        for place, files in Counter(path.parent for path in written).items():
            print(f"{files} files of the flight recorder: torchfrtrace -p rank_ {place}")
    raise typer.Exit(int(keeps))


@app.command(cls=SubmitCommand, epilog=epilog(*EXAMPLES["submit"]), context_settings=_BEHIND)
@_reporting_errors
def submit(
    context: typer.Context,
    name: JobScript,
    nodes: Annotated[int | None, typer.Option(help="nodes of the job")] = None,
    gpus_per_node: GpusPerNode = "",
    ntasks_per_node: TasksPerNode = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="cores of a rank")] = None,
    mem: Memory = "",
    time: TimeLimit = "",
    account: Annotated[str, typer.Option(help="account to charge")] = "",
    partition: Annotated[str, typer.Option(help="partition")] = "",
    array: Annotated[str, typer.Option(help="tasks of a job array: 0-7, 1-99%4")] = "",
    job_name: Annotated[str, typer.Option("--name", help="name of the job")] = "",
    sbatch: Sbatch = None,
    settings: Settings = None,
    env: EnvFile = None,
    dry_run: DrySubmit = False,
) -> None:
    """Submit a shipped job script to Slurm, with your options in its header.

    The program and its arguments stand behind --; without them the script runs an example. Numbers
    left out are the partition's. A job that Slurm could not start is refused.
    """
    from mpidist.cli import submit as submission
    from mpidist.slurm.job_script import Options

    given: dict[str, str | int | None] = {
        "job-name": job_name,
        "nodes": nodes,
        "ntasks-per-node": ntasks_per_node,
        "gpus-per-node": gpus_per_node,
        "cpus-per-task": cpus_per_task,
        "mem": mem,
        "time": time,
        "account": account,
        "partition": partition,
        "array": array,
    }
    header: dict[str, str | None] = {
        key: str(value) for key, value in given.items() if value not in (None, "")
    }
    header |= submission.parse_pairs(sbatch, "--sbatch")
    options = Options(header, submission.parse_pairs(settings, "--set"), tuple(context.args))
    status = submission.run(name, options, env, os.environ, dry_run)
    if status is not None:
        raise typer.Exit(status)
