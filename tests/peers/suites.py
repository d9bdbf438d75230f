"""Test suites of others as data, and their runs on both sides."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.peers import beside_groups, jobs
from tests.peers.bindings import BINDINGS
from tests.peers.outcomes import (
    Outcome,
    Row,
    Verdict,
    joined,
    last_error,
    of_junit,
    of_unittest,
    short,
)
from tests.peers.process_start import RECORD


@dataclass(frozen=True)
class TestSuite:
    """Suite of tests that pytest runs, whose spawned processes become ranks of jobs."""

    __test__ = False  # for pytest, which sees the name where it is imported

    label: str
    files: tuple[str, ...]  # in the folder of the sources
    # What is bound in the place of the suite's names: module:name=module:name.
    bindings: str = ""
    # The same on both sides: names that torch has changed since the suite was written.
    later_names: str = ""
    limit_s: float = 2400.0
    # Why tests fail on mpidist, by their names.
    causes: Mapping[str, str] = field(default_factory=dict)


_FAIRSCALE = ("fairscale/tests/optim/test_oss.py", "fairscale/tests/optim/test_oss_adascale.py")
_TORCHS_TESTS = "torch.testing._internal.common_distributed"
_SINCE_2_1 = f"{_TORCHS_TESTS}:skip_if_rocm={_TORCHS_TESTS}:skip_if_rocm_multiprocess"
_ZERO = ("pytorch/test/distributed/optim/test_zero_redundancy_optimizer.py",)

OPTIMIZERS = (
    TestSuite(
        "FairScale's tests of OSS, on mpidist.optim.OSS",
        _FAIRSCALE,
        "fairscale.optim:OSS=mpidist.optim:OSS",
    ),
    TestSuite("FairScale's tests of OSS, FairScale's OSS on our groups", _FAIRSCALE),
    TestSuite(
        "torch's tests of ZeroRedundancyOptimizer, on mpidist.optim's",
        _ZERO,
        "torch.distributed.optim:ZeroRedundancyOptimizer=mpidist.optim:ZeroRedundancyOptimizer",
        _SINCE_2_1,
        causes={
            "test_same_dense_param_type": "wants an error for parameters of two dtypes, which "
            "ours takes",
            "test_sharding": "counts parameters without `requires_grad` by their elements; ours "
            "counts each as one element, because it has no state",
            "test_zero_join_cpu": "reads torch's private `_all_params`",
        },
    ),
    TestSuite(
        "torch's tests of ZeroRedundancyOptimizer, torch's on our groups",
        _ZERO,
        later_names=_SINCE_2_1,
    ),
)


def pytest_command(suite: TestSuite, side: str, report: Path) -> list[str]:
    """Return the command line of a suite, whose files are in the folder of the run."""
    plugin = ["-p", "tests.peers.spawned"] if side == jobs.OURS else []
    return [
        *(sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider"),
        *plugin,
        *("--rootdir", ".", f"--junitxml={report}", "-o", "junit_family=xunit1"),
        *(Path(file).name for file in suite.files),
    ]


def outcomes(suite: TestSuite, sources: Path, side: str, logs: Path) -> dict[str, Outcome]:
    """Run a suite on one side.

    Raises:
        RuntimeError: pytest has left no report.
    """
    with tempfile.TemporaryDirectory(prefix="peers-") as text:
        folder = Path(text)
        report = folder / "report.xml"
        # Beside their packages the files would be imported as tests.optim…, a name of ours.
        for file in suite.files:
            shutil.copy(sources / file, folder)
        record = folder / "record"
        variables = jobs.environment(side, record)
        listed = (suite.later_names, suite.bindings if side == jobs.OURS else "")
        variables[BINDINGS] = ",".join(filter(None, listed))
        end = jobs.run([pytest_command(suite, side, report)], folder, variables, suite.limit_s)
        name = re.sub(r"\W+", "_", suite.label)
        (logs / f"{name}.{side}.txt").write_text(end.output)
        if not report.exists():
            raise RuntimeError(f"{suite.label}: pytest has left no report\n{end.output[-2000:]}")
        (logs / f"{name}.{side}.xml").write_text(report.read_text())
        groups = set(record.read_text().splitlines()) if record.exists() else set()
        if side == jobs.OURS and groups - {"group mpidist"}:
            raise RuntimeError(f"{suite.label}: not all groups were mpidist's: {groups}")
        return of_junit(report.read_text())


def run_tests(
    suite: TestSuite, sources: Path, logs: Path, known: dict[tuple[str, ...], Mapping[str, Outcome]]
) -> list[Row]:
    """Run a suite on both sides; ``known`` keeps the peer's outcomes by the suite's files."""
    missing = [file for file in suite.files if not (sources / file).is_file()]
    if missing:
        return [
            Row(file, Verdict.ABSENT, note="its source is not among SOURCES") for file in missing
        ]
    if suite.files not in known:
        known[suite.files] = outcomes(suite, sources, jobs.PEER, logs)
    return explained(joined(outcomes(suite, sources, jobs.OURS, logs), known[suite.files]), suite)


def explained(rows: Iterable[Row], suite: TestSuite) -> list[Row]:
    """Return the rows of a suite, those that fail on mpidist alone with the causes it knows."""
    return [
        replace(row, note=suite.causes[name])
        if row.verdict is Verdict.OURS_FAILS
        and (name := row.name.rpartition("::")[2]) in suite.causes
        else row
        for row in rows
    ]


def mpi4py_command(test: Path, ranks: int, side: str) -> list[str]:
    """Return the command line of mpi4py's own suite, beside busy groups of mpidist on our side."""
    ours = side == jobs.OURS
    beside = ["-m", "tests.peers.beside_groups"] if ours else []
    # Tests that spawn processes of MPI need room for them; the launcher here has two cores.
    excluded = ["test_spawn", "test_dynproc"]
    if ours:
        # Open MPI's progress of MPI-IO and of partitioned messages is not safe in several threads:
        # a request beside another thread's call of MPI may end in a segmentation fault, or never.
        excluded += ["test_io", "test_p2p_buf_part"]
    return [
        *jobs.launcher(ranks),
        sys.executable,
        *beside,
        str(test / "main.py"),
        *(word for name in excluded for word in ("-e", name)),
    ]


def run_mpi4py(sources: Path, logs: Path, ranks: int) -> Row:
    """Run mpi4py's suite alone, and beside groups of mpidist."""
    name = f"mpi4py/test on {ranks} rank{'s' if ranks > 1 else ''}"
    test = sources / "mpi4py" / "test"
    if not (test / "main.py").is_file():
        return Row(name, Verdict.ABSENT, note="its source is not among SOURCES")
    texts: dict[str, str] = {}
    for side in (jobs.PEER, jobs.OURS):
        variables = jobs.environment(side, logs / "record")
        del variables[RECORD]
        end = jobs.run([mpi4py_command(test, ranks, side)], test, variables, 900.0)
        texts[side] = end.output
        (logs / f"mpi4py-{ranks}.{side}.txt").write_text(end.output)
    try:
        alone = of_unittest(texts[jobs.PEER])[2]
    except ValueError as error:
        return Row(name, Verdict.ABSENT, note=f"without mpidist {error}")
    try:
        ran, skipped, failed = of_unittest(texts[jobs.OURS])
    except ValueError as error:
        return Row(name, Verdict.OURS_FAILS, note=str(error))
    if beside_groups.SAID not in texts[jobs.OURS]:
        return Row(name, Verdict.OURS_FAILS, note=short(last_error(texts[jobs.OURS])))
    ours = sorted(set(failed) - set(alone))
    note = f"{ran - skipped} tests passed, {skipped} that mpi4py skips on this MPI"
    if failed:
        note = f"{ran - skipped - len(failed)} of {ran - skipped} tests passed; {', '.join(failed)}"
    kind = Verdict.OURS_FAILS if ours else Verdict.BOTH_FAIL if failed else Verdict.PASSED
    return Row(name, kind, note=note)


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, if it is one."""
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 and (folder / ".git").exists() else ""
