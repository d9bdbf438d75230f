"""Steps of ``make gpu``: their commands, their limits, and what they need."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.machine import SANITIZER, Machine, Settings
from tests.gpu.plan import BENCHMARKS, SANITIZERS, TESTS

# Before the plan: it needs the files of tests. Then, what MPI does with device memory.
START, CAPABILITY = "start", "capability"
LISTED = "listed"
# Inductor compiles in these, with an empty cache on a machine that was just started.
COMPILED = ("tests/integration/test_torch_compile.py",)
COMPILED_HANG_S = 120
RANKS = {"tests/conformance/test_nn.py": 3}  # 2 for any other file

_ON_NODES = "tests/comm/algorithms/test_device_collectives.py"
_MESSAGES = "tests/comm/messages/test_device_p2p.py"
_HELLO = (
    "from mpi4py import MPI; w = MPI.COMM_WORLD\n"
    "print(f'rank {w.rank} of {w.size} {MPI.Get_library_version().split(chr(44))[0]}\\n', end='')"
)
# Kernels whose blocks, warps or memory the sanitizers check.
_BLOCKS_AND_WARPS = (
    "its_matrix_product and 4-torch.float32 or many_rows or orthonormal and 5-torch.float32"
    " or (tall or registers) and 3-torch.float32 or long_rows and torch.float32-False"
)
_ANY_MEMORY = (
    "alignment or byte or moves_as_it_is or its_matrix_product and 4-torch"
    " or orthonormal and 5-torch.float32 or tall and 3-torch.float32"
)


@dataclass(frozen=True)
class Step:
    """A command with a limit.

    Attributes:
        name: As the summary has it.
        phase: START, CAPABILITY, or one of ``plan.PHASES``.
        limit_s: Time after which it is ended.
        needs: Settings with the prefix of an MPI, programs and modules.
        command: Program and arguments.
        env: Variables beyond those of the machine.
        shares_gpu: Ranks of a benchmark that use the GPU at the same time, if there is a service
            for that.
    """

    name: str
    phase: str
    limit_s: float
    needs: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    shares_gpu: bool = False


@dataclass(frozen=True)
class Launch:
    """Start of ranks by one MPI: the command up to the interpreter, and its variables."""

    need: str
    command: tuple[str, ...]
    env: Mapping[str, str]


def is_asked(name: str, patterns: Sequence[str]) -> bool:
    """Return whether STEPS names a step, or names none."""
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def short(file: str) -> str:
    """Return the name of a file of tests in the name of its step."""
    return file.removeprefix("tests/").removesuffix(".py").replace("test_", "", 1)


class Steps:
    """The steps of a machine."""

    def __init__(self, chosen: Settings, found: Machine) -> None:
        self._chosen = chosen
        self._found = found
        self._python = chosen.python
        self._aware = self._openmpi("CUDA_MPI", {"OMPI_MCA_pml": "ob1"})
        self._plain = self._openmpi("OPENMPI", {})
        # One process alone, and benchmarks that do not compare the two, take the better one.
        self._best = self._aware if "CUDA_MPI" in found.prefixes else self._plain
        if chosen.is_dry:
            self._one_process: tuple[str, ...] = (
                *("-m", "not gpu and not mpi", "tests/kernels/test_pack.py", "-k", "twin"),
            )
            self._two_ranks: tuple[str, ...] = (
                *("-m", "mpi and not gpu", "-k"),
                "premul or nan_wins or another_backend or compiled_outside or movements",
            )
            self._tree = (
                _ON_NODES,
                *(
                    f"tests/integration/test_{name}.py"
                    for name in ("other_backends", "torch_compile", "torch_on_gpu")
                ),
            )
            self._on_nodes: tuple[str, ...] = (_ON_NODES,)
        else:
            self._one_process = ("-m", "gpu and not mpi", "tests")
            self._two_ranks = ("-m", "gpu and mpi")
            self._tree = ("tests",)
            self._on_nodes = (
                *(_ON_NODES, _MESSAGES),
                *("tests/ddp/hooks/test_default.py", "tests/ddp/test_training.py"),
            )

    # --- before the plan ---

    def start(self) -> list[Step]:
        """Return the steps that need no plan: the machine, the list of files, a start of ranks."""
        collect = ("--collect-only", "--only-mpi", *self._two_ranks, *self._tree)
        steps = [
            Step("machine", START, 30, (), ("tests/gpu/machine.sh", self._python)),
            # Modules that cannot be imported are named here, and cost no other step a test.
            self._alone(LISTED, START, 100, ("pytest",), *self._pytest(), *collect),
        ]
        for kind, launch in (("aware", self._aware), ("plain", self._plain)):
            hello = ("-c", _HELLO)
            steps.append(self._job(f"start:{kind}", START, 40, launch, hello, ("mpi4py",)))
        return steps

    def capability(self) -> list[Step]:
        """Return the trials of device memory: an operation may hang, which a test must not."""
        command = (self._python, "-m", "tests.gpu.capability")
        return [
            Step(name, CAPABILITY, limit_s, (launch.need, "mpi4py"), command, launch.env)
            for name, limit_s, launch in (
                ("capability:aware", 150, self._aware),
                ("capability:staged", 60, self._plain),
            )
        ]

    # --- by plan ---

    def planned(self, files: Sequence[str]) -> list[Step]:
        """Return all steps of the plan's phases.

        Args:
            files: Those with tests of two ranks.
        """
        return [*self._tests(files), *self._benchmarks(), *self._sanitizers()]

    def _tests(self, files: Sequence[str]) -> Iterator[Step]:
        maxfail = (f"--maxfail={self._chosen.maxfail}",)
        needs = ("pytest",) if self._chosen.is_dry else ("pytest", "cupy")
        one = (*self._pytest(), *maxfail, *self._one_process)
        yield self._alone("one-process", TESTS, 200, needs, *one)
        for file in files:
            yield self._of_file(f"aware:{short(file)}", 160, self._aware, file)
            yield self._of_file(f"staged:{short(file)}", 160, self._plain, file)
        # MPI starts before CUDA, as in a script that makes its process group first.
        first = (
            *("-m", "mpi4py", "-m", "pytest", *self._ranks()),
            *(_ON_NODES, _MESSAGES, "tests/rpc/test_cuda.py"),
        )
        yield self._job("mpi-first", TESTS, 110, self._aware, first, ("pytest", "mpi4py"))
        # Each rank takes itself for a node of its own, and its messages go over TCP.
        nodes = {
            "MPIDIST_TEST_NODES": "1",
            "OMPI_MCA_btl": "self,tcp",
            "OMPI_MCA_btl_tcp_if_include": "lo",
        }
        over_tcp = Launch("OPENMPI", self._plain.command, {**self._plain.env, **nodes})
        mpich = self._mpich("-n", "2")
        linked = Launch(
            "MPICH", ("benchmarks/slow_link.sh", "10gbit", *self._mpich().command), mpich.env
        )
        for file in self._on_nodes:
            yield self._of_file(f"nodes:{short(file)}", 110, over_tcp, file)
            yield self._of_file(f"mpich:{short(file)}", 110, mpich, file)
        yield self._of_file("namespaces", 110, linked, *self._on_nodes)

    def _benchmarks(self) -> Iterator[Step]:
        to = ("--device", self._chosen.device, "--output", str(self._found.work / "results"))
        quick: tuple[str, ...] = ()
        with_cuda: tuple[str, ...] = ()
        kernels: tuple[str, ...] = ("--quick",)
        tune: tuple[str, ...] = ("--rounds", "7")
        ddp: tuple[str, ...] = ()
        powersgd: tuple[str, ...]
        if self._chosen.is_dry:
            quick = ("--quick",)
            tune = ("--device", "cpu", "--sizes", "4096", "--rounds", "2")
            ddp = ("--models", "many:2", "--rounds", "2", "--burst-s", "0.001")
            powersgd = ("--models", "many:2", "--rounds", "1", "--bucket-cap-mb", "1")
        else:
            kernels = ("--limit-s", "100")
            models = ("mlp:256", "resnet18:64", "transformer:64")
            powersgd = ("--models", *models, "--rounds", "9", "--bucket-cap-mb", "25")
            with_cuda = ("cupy",)
        needs = ("rich", "psutil", "mpi4py")
        # What tune finds does not decide what the tests of a later call use.
        apart = {"MPIDIST_CACHE": str(self._found.work / "findings")}
        yield self._alone(
            *("bench-kernels", BENCHMARKS, 150, (*needs, *with_cuda)),
            *("benchmarks/bench_kernels.py", *to, *kernels),
        )
        # NCCL takes one rank a device.
        yield self._alone(
            *("bench-ddp-nccl", BENCHMARKS, 120, needs),
            *("benchmarks/bench_ddp_nccl.py", *to, *ddp),
        )
        for name, limit_s, launch, command in (
            ("tune", 100, self._aware, ("-m", "tests.gpu.rank", "mpidist.tune", *tune)),
            ("bench-device", 60, self._aware, ("benchmarks/bench_device.py", *to, *quick)),
            ("bench-device-staged", 50, self._plain, ("benchmarks/bench_device.py", *to, *quick)),
            ("bench-rpc-device", 100, self._best, ("benchmarks/bench_rpc_device.py", *to, *quick)),
            ("bench-oss-device", 120, self._best, ("benchmarks/bench_oss_device.py", *to, *quick)),
            ("bench-powersgd", 100, self._best, ("benchmarks/bench_powersgd.py", *to, *powersgd)),
        ):
            shared = Launch(launch.need, launch.command, {**launch.env, **apart})
            yield self._job(name, BENCHMARKS, limit_s, shared, command, needs, shares_gpu=True)

    def _sanitizers(self) -> Iterator[Step]:
        """Yield steps that run beside no job of two ranks: they would slow it past its limits."""
        checked = (
            *(self._python, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"),
            *("--continue-on-collection-errors", "-m", "gpu"),
        )
        # torch and CuPy ask the driver for what it may lack; memcheck alone would count such a
        # question as an error.
        for tool, options, tests in (
            ("memcheck", ("--report-api-errors", "no"), _ANY_MEMORY),
            ("racecheck", (), _BLOCKS_AND_WARPS),
            ("synccheck", (), _BLOCKS_AND_WARPS),
        ):
            sanitizer = (SANITIZER, "--error-exitcode", "9", "--print-limit", "20", "--tool", tool)
            yield Step(
                tool,
                SANITIZERS,
                200,
                (SANITIZER, "pytest", "cupy"),
                (*sanitizer, *options, *checked, "-k", tests, "tests/kernels"),
                # Each tensor is an allocation of its own, so that what is beside it is seen.
                {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )

    # --- parts of commands ---

    def _openmpi(self, need: str, env: Mapping[str, str]) -> Launch:
        prefix = self._found.prefixes.get(need, Path("/nonexistent"))
        own = dict.fromkeys(("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"), str(prefix))
        own["MPI4PY_LIBMPI"] = str(prefix / "lib/libmpi.so.40")
        command = (str(prefix / "bin/mpirun"), "--oversubscribe", "--bind-to", "none")
        return Launch(need, (*command, "-n", "2", self._python), {**own, **env})

    def _mpich(self, *options: str) -> Launch:
        prefix = self._found.prefixes.get("MPICH", Path("/nonexistent"))
        own = {"MPI4PY_LIBMPI": str(prefix / "lib/libmpi.so.12")}
        return Launch("MPICH", (str(prefix / "bin/mpirun"), *options, self._python), own)

    def _alone(
        self, name: str, phase: str, limit_s: float, needs: tuple[str, ...], *words: str
    ) -> Step:
        """Return a step of one process."""
        env = self._best.env if self._best.need in self._found.prefixes else {}
        return Step(name, phase, limit_s, needs, (self._python, *words), env)

    def _job(
        self,
        name: str,
        phase: str,
        limit_s: float,
        launch: Launch,
        words: Sequence[str],
        needs: Sequence[str],
        shares_gpu: bool = False,
    ) -> Step:
        command = (*launch.command, *words)
        return Step(name, phase, limit_s, (launch.need, *needs), command, launch.env, shares_gpu)

    def _of_file(self, name: str, limit_s: float, launch: Launch, *files: str) -> Step:
        """Return a job of tests whose ranks start CUDA before MPI."""
        is_compiled = any(file in COMPILED for file in files)
        hang_s = max(self._chosen.hang_s, COMPILED_HANG_S if is_compiled else 0)
        ranks = max(RANKS.get(file, 2) for file in files)
        if ranks != 2:
            place = launch.command.index("-n") + 1
            command = list(launch.command)
            command[place] = str(ranks)
            launch = Launch(launch.need, tuple(command), launch.env)
        words = ("-m", "tests.gpu.rank", "pytest", *self._ranks(hang_s), *files)
        # Two tests that compile may take their time.
        limit_s = max(limit_s, 2 * COMPILED_HANG_S if is_compiled else 0)
        return self._job(name, TESTS, limit_s, launch, words, ("pytest", "mpi4py"))

    def _ranks(self, hang_s: int | None = None) -> tuple[str, ...]:
        maxfail = f"--maxfail={self._chosen.maxfail}"
        return (*self._options(hang_s), maxfail, "--only-mpi", *self._two_ranks)

    def _pytest(self) -> tuple[str, ...]:
        return ("-m", "pytest", *self._options())

    def _options(self, hang_s: int | None = None) -> tuple[str, ...]:
        return (
            *("-q", "--color=no", "--continue-on-collection-errors", "-p", "no:cacheprovider"),
            *("-p", "tests.tools.instant_failures", "-o", "console_output_style=classic"),
            *("-o", f"faulthandler_timeout={hang_s or self._chosen.hang_s}"),
        )


def first_missing(step: Step, found: Machine) -> str | None:
    """Return what a step needs and the machine lacks; an MPI before a module."""
    return next((need for need in step.needs if need in found.lacks), None)
