"""Planned command lines for combinations of request, machine and environment; pure."""

import dataclasses
import itertools
import shlex

import pytest

from mpidist.cli.launch_plan import plan, program_of
from mpidist.cli.launch_request import BINDINGS, Request, Site
from mpidist.errors import LaunchError

OPEN = Site(
    "openmpi",
    "Open MPI v5.0.11, package: x",
    "/m/lib/libmpi.so.40",
    "/m/bin/mpirun",
    "",
    (),
    4,
    False,
)
OLD = dataclasses.replace(OPEN, library="Open MPI v4.1.6, package: x")
MPICH = dataclasses.replace(
    OPEN, abi="mpich", library="MPICH Version: 5.0", mpirun="/m/bin/mpiexec.hydra"
)
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"}
SRUN = {"srun": "/s/srun", "mpi_types": ("none", "pmi2", "pmix", "pmix_v4")}
TRAIN = ("python", "train.py", "--epochs", "3")


def argv(request, site, environ=(), **wish):
    return " ".join(plan(dataclasses.replace(request, **wish), site, dict(environ)).argv)


@pytest.mark.parametrize(
    ("site", "wish", "expected"),
    [
        (OPEN, {"ranks": 2}, "/m/bin/mpirun -n 2 --bind-to none"),
        (OPEN, {"ranks": 5}, "/m/bin/mpirun -n 5 --oversubscribe --bind-to none"),
        (
            OPEN,
            {"ranks": 4, "tags": True, "ulfm": True},
            "/m/bin/mpirun -n 4 --bind-to none --output tag --with-ft ulfm",
        ),
        (
            OLD,
            {"ranks": 4, "tags": True, "binding": "socket"},
            "/m/bin/mpirun -n 4 --bind-to socket --tag-output",
        ),
        (OPEN, {"ranks": 4, "binding": "socket"}, "/m/bin/mpirun -n 4 --bind-to package"),
        (
            OPEN,
            {"ranks": 8, "hosts": ("a:4", "b:4")},
            "/m/bin/mpirun -n 8 --bind-to none --host a:4,b:4 -x OMP_NUM_THREADS",
        ),
        (
            OPEN,
            {"ranks": 8, "hostfile": "h"},
            "/m/bin/mpirun -n 8 --bind-to none --hostfile h -x OMP_NUM_THREADS",
        ),
        (MPICH, {"ranks": 9}, "/m/bin/mpiexec.hydra -n 9"),
        (
            MPICH,
            {"ranks": 2, "tags": True, "binding": "core"},
            "/m/bin/mpiexec.hydra -n 2 -bind-to core -prepend-rank",
        ),
        (MPICH, {"ranks": 2, "hosts": ("a", "b")}, "/m/bin/mpiexec.hydra -n 2 -hosts a,b"),
        (MPICH, {"ranks": 2, "hostfile": "h"}, "/m/bin/mpiexec.hydra -n 2 -f h"),
    ],
)
def test_mpirun_outside_slurm(site, wish, expected):
    assert argv(Request(TRAIN), site, **wish) == f"{expected} {' '.join(TRAIN)}"


@pytest.mark.parametrize(
    ("site", "environ", "wish", "expected"),
    [
        (OPEN, {}, {}, "--mpi=pmix --kill-on-bad-exit=1"),
        (
            MPICH,
            {},
            {"ranks": 4, "nodes": 2},
            "--mpi=pmi2 --ntasks=4 --nodes=2 --kill-on-bad-exit=1",
        ),
        (
            OPEN,
            {"SLURM_MPI_TYPE": "pmix_v3"},
            {"tags": True},
            "--mpi=pmix_v3 --label --kill-on-bad-exit=1",
        ),
        (
            OPEN,
            {"SLURM_MPI_TYPE": "pmix_v3"},
            {"mpi_type": "pmix_v4"},
            "--mpi=pmix_v4 --kill-on-bad-exit=1",
        ),
        (
            OPEN,
            {"SLURM_CPUS_PER_TASK": "8"},
            {"binding": "numa"},
            "--mpi=pmix --cpu-bind=ldoms --cpus-per-task=8 --kill-on-bad-exit=1",
        ),
        (
            OPEN,
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            {},
            "--mpi=pmix --overlap --kill-on-bad-exit=1",
        ),
        (
            OPEN,
            {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
            {},
            "--mpi=pmix --kill-on-bad-exit=1",
        ),
    ],
)
def test_srun_inside_slurm(site, environ, wish, expected):
    site = dataclasses.replace(site, **SRUN)
    assert (
        argv(Request(TRAIN), site, SLURM | environ, **wish)
        == f"/s/srun {expected} {' '.join(TRAIN)}"
    )


def test_mpirun_inside_slurm_where_srun_cannot():
    for site, environ in [
        (OPEN, SLURM),  # no srun
        (dataclasses.replace(OPEN, srun="/s/srun", mpi_types=("none", "pmi2")), SLURM),
    ]:
        planned = plan(Request(TRAIN, nodes=2), site, environ)
        assert (
            planned.argv[:4] == ("/m/bin/mpirun", "-n", "8", "--bind-to")
            and "ppr:4:node" in planned.argv
        )
        assert "mpirun" in planned.notes[0]
    planned = plan(Request(TRAIN, ranks=2, ulfm=True), dataclasses.replace(OPEN, **SRUN), SLURM)
    assert (
        planned.argv[0] == "/m/bin/mpirun"
        and "ulfm" in planned.argv
        and "whose rank dies" in planned.notes[0]
    )
    assert "-ppn 4" in argv(Request(TRAIN, nodes=2), MPICH, SLURM)


def test_memory_that_the_ranks_of_a_node_lack_is_noted():
    for site in (OPEN, MPICH):
        for free, hosts, notes in ((-1, (), 0), (64 << 20, (), 0), (63 << 20, (), 1), (1, "ab", 0)):
            short = dataclasses.replace(site, shm_free_bytes=free)
            planned = plan(Request(TRAIN, ranks=4, hosts=tuple(hosts)), short, {})
            assert len(planned.notes) == notes, planned.notes
            assert all("/dev/shm has 63 MiB left; 4 ranks" in note for note in planned.notes)


@pytest.mark.parametrize(
    ("site", "environ", "wish", "words"),
    [
        (
            OPEN,
            {"OMPI_COMM_WORLD_SIZE": "4"},
            {"ranks": 2},
            "mpirun (Open MPI) started: mpidist starts the ranks by itself",
        ),
        (OPEN, {"SLURM_STEP_NUM_TASKS": "2", **SLURM}, {}, "already one of 2 ranks that srun"),
        (dataclasses.replace(OPEN, mpirun=""), {}, {"ranks": 2}, "no mpirun or mpiexec was found"),
        (OPEN, {}, {}, "number of ranks is not given"),
        (OPEN, {}, {"ranks": 2, "nodes": 2}, "mpidist submit"),
        (OPEN, {}, {"ranks": 2, "mpi_type": "pmix"}, "--mpi is srun's"),
        (OPEN, SLURM, {"nodes": 3}, "3 nodes are asked for, this Slurm job has 2"),
        (OPEN, SLURM, {"nodes": 2, "ranks": 1}, "1 ranks cannot be on 2 nodes"),
        (OPEN, SLURM, {"hosts": ("a",)}, "leave --hosts"),
        (OLD, {}, {"ranks": 2, "ulfm": True}, "Open MPI 5 or newer; this is Open MPI v4.1.6"),
        (MPICH, {}, {"ranks": 2, "ulfm": True}, "MPICH has no ULFM"),
        (OPEN, {}, {"ranks": 2, "spares": 1}, "--spares needs --ft"),
        (OPEN, {}, {"ranks": 2, "heartbeat": True}, "--heartbeat needs --ft"),
        (OPEN, {}, {"ranks": 1, "ulfm": True, "spares": 2}, "2 spares for 1 ranks"),
        (OPEN, SLURM, {"ulfm": True, "spares": 5}, "5 spares for 3 ranks"),
        (OPEN, {}, {"ranks": 10**11}, "100000000000 ranks on "),
        (MPICH, {}, {"ranks": 10**11}, "100000000000 ranks on "),
    ],
)
def test_what_cannot_start_says_so(site, environ, wish, words):
    with pytest.raises(LaunchError, match=words.replace("(", r"\(").replace(")", r"\)")):
        plan(Request(TRAIN, **wish), site, environ)


def test_variables_are_set_unless_the_user_has():
    root = dataclasses.replace(OPEN, is_root=True)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert plan(Request(TRAIN, 2), root, {}).variables == {"OMP_NUM_THREADS": "1", **allowed}
    assert plan(Request(TRAIN, 2), root, {"OMP_NUM_THREADS": "8", **allowed}).variables == {}
    assert plan(Request(TRAIN, 2), dataclasses.replace(MPICH, is_root=True), {}).variables == {
        "OMP_NUM_THREADS": "1"
    }
    far = argv(
        Request(TRAIN, 2, hosts=("a", "b")), root, {"MPIDIST_DEBUG": "1", "OMP_NUM_THREADS": "2"}
    )
    assert "-x MPIDIST_DEBUG -x OMP_NUM_THREADS python" in far


def test_spares_are_processes_behind_the_ranks():
    made = plan(Request(TRAIN, 3, ulfm=True, spares=1), OPEN, {})
    assert made.argv[:3] == ("/m/bin/mpirun", "-n", "4") and "--with-ft" in made.argv
    assert made.variables["MPIDIST_SPARES"] == "1"
    # Of an allocation's tasks the last ones; other nodes get the variable, too.
    made = plan(Request(TRAIN, ulfm=True, spares=2), OPEN, SLURM)
    assert made.argv[:3] == ("/m/bin/mpirun", "-n", "8") and "MPIDIST_SPARES" in made.argv


@pytest.mark.parametrize(
    ("site", "environ"), [(OPEN, {}), (MPICH, {}), (dataclasses.replace(OPEN, **SRUN), SLURM)]
)
def test_a_colon_among_the_arguments_is_no_launchers(site, environ):
    words = ("python", "it's.py", "a", ":", "b c")
    *_, shell, option, line = plan(Request(words, 2), site, environ).argv
    assert (shell, option) == ("/bin/sh", "-c")
    assert shlex.split(line) == ["exec", *words]
    # A word with a colon in it is no launcher's, either.
    assert plan(Request(("python", "a:b"), 2), site, environ).argv[-1] == "a:b"


def test_every_wish_ends_with_the_program_or_an_error():
    """Every plan ends with the program, and only plans within Slurm use srun."""
    planned = 0
    sites = [
        OPEN,
        OLD,
        MPICH,
        dataclasses.replace(OPEN, **SRUN),
        dataclasses.replace(MPICH, **SRUN),
    ]
    for site, environ, ranks, binding, tags, ulfm in itertools.product(
        sites, ({}, SLURM), (None, 1, 4, 64), ("", *BINDINGS), (False, True), (False, True)
    ):
        try:
            made = plan(Request(TRAIN, ranks, binding=binding, tags=tags, ulfm=ulfm), site, environ)
        except LaunchError:
            assert (ranks is None and not environ) or ulfm
            continue
        planned += 1
        assert made.argv[-len(TRAIN) :] == TRAIN
        assert (made.argv[0] == "/s/srun") == (bool(environ) and bool(site.srun) and not ulfm)
    assert planned > 100


def test_a_program_is_found_or_named():
    def there(name):
        return name in ("train.py", "ls")

    assert program_of(["train.py", "-n", "3"], "", "py", there) == ("py", "train.py", "-n", "3")
    assert program_of(["ls", "-l"], "", "py", there) == ("ls", "-l")
    assert program_of(["--x"], "a.b", "py", there) == ("py", "-m", "a.b", "--x")
    for words, said in [
        ([], "no program is given"),
        (["gone.py"], "gone.py: no such file"),
        (["gone"], "gone: no such program"),
    ]:
        with pytest.raises(LaunchError, match=said):
            program_of(words, "", "py", there)


def test_a_launcher_gets_a_home_where_the_environment_has_none():
    site = dataclasses.replace(OPEN, home="/h")
    request = Request(TRAIN, ranks=2, hosts=("a", "b"))
    assert plan(request, site, {}).variables["HOME"] == "/h"
    assert plan(request, site, {"HOME": ""}).variables["HOME"] == "/h"
    assert "HOME" not in plan(request, site, {"HOME": "/mine"}).variables
    # A node has a home of its own.
    assert "HOME" not in plan(request, site, {}).argv
