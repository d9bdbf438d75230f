"""Steps of ``make gpu``: no file is dropped, and each command is what its name says."""

import fnmatch
import re
from pathlib import Path

import pytest

from tests.gpu import plan, record, steps
from tests.gpu.machine import PREFIXES, SANITIZER, Machine, settings
from tests.gpu.plan import NEVER, OK
from tests.tools.support import ROOT

FOLDERS = ("autograd", "c10d", "checkpoint", "cli", "comm", "conformance", "ddp", "integration")
FILES = [f"tests/{folder}/test_a.py" for folder in (*FOLDERS, "nn", "rpc", "zero")]


def machine_of(tmp_path, lacks=()):
    prefixes = {name: tmp_path / name for name in PREFIXES if name not in lacks}
    missing = dict.fromkeys(lacks, "somewhere")
    return Machine(tmp_path, {}, prefixes, missing, "about")


@pytest.fixture
def every(tmp_path):
    return steps.Steps(settings({"DEVICE": "cuda"}), machine_of(tmp_path))


def listed_files():
    """Return the files that the known times of a GPU have."""
    known = record.past(record.read(record.KNOWN), device="cuda")
    names = [name.removeprefix("aware:") for name in known if name.startswith("aware:")]
    return [f"tests/{Path(name).parent}/test_{Path(name).name}.py" for name in names]


def test_each_file_runs_through_both_mpis(every):
    names = {step.name for step in every.planned(FILES)}
    for folder in (*FOLDERS, "nn", "rpc", "zero"):
        assert {f"aware:{folder}/a", f"staged:{folder}/a"} <= names


def test_all_steps_are_there(every):
    names = [step.name for step in every.start() + every.capability() + every.planned(FILES)]
    assert len(set(names)) == len(names)
    assert {
        *("machine", "listed", "start:aware", "start:plain", "capability:aware"),
        *("capability:staged", "one-process", "mpi-first", "namespaces"),
        *("nodes:comm/algorithms/device_collectives", "mpich:ddp/training"),
        *("bench-kernels", "tune", "bench-device", "bench-device-staged", "bench-powersgd"),
        *("bench-rpc-device", "bench-oss-device", "bench-ddp-nccl"),
        *("memcheck", "racecheck", "synccheck"),
    } <= set(names)


def test_each_benchmark_with_a_device_has_a_step(every, tmp_path):
    dry = steps.Steps(settings({"DEVICE": "cpu"}), machine_of(tmp_path))
    for offered in (every, dry):
        run = {word for step in offered.planned(FILES) for word in step.command}
        for path in (ROOT / "benchmarks").glob("bench_*.py"):
            source = path.read_text()
            if '"--device"' in source or '"device"' in source:
                assert f"benchmarks/{path.name}" in run, path.name


def test_each_step_has_a_place_in_the_default_order(every):
    order = record.order()
    names = [step.name for step in every.planned(FILES)]
    for name in names:
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in order), name
    for pattern in order:
        assert pattern.endswith("*") or pattern in names, pattern


def test_six_calls_of_nine_minutes_run_all_and_what_never_ran_first(every):
    known = record.past(record.read(record.KNOWN), device="cuda")
    offered = every.planned(listed_files())
    done: set[str] = set()
    for call in range(1, 7):
        found = plan.plan(offered, known, record.order(), 440, 2)
        chosen = [step.name for phase in plan.PHASES for step in found.chosen[phase]]
        assert found.chosen[plan.BENCHMARKS]
        if call == 1:
            assert {f"aware:{name}/cuda" for name in ("rpc", "autograd", "zero", "nn")} <= {*chosen}
            assert all(known[step.name].outcome == NEVER for step in found.chosen[plan.TESTS])
        for name in chosen:
            known[name] = record.updated(known[name], OK, known[name].seconds, call)
        done.update(chosen)
    assert done == {step.name for step in offered}


def hang_s(step):
    return [word for word in step.command if word.startswith("faulthandler_timeout=")]


def test_only_what_compiles_has_a_longer_limit(tmp_path, every):
    text = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    own = Path(__file__)
    compiled = {
        str(path.relative_to(ROOT))
        for path, source in text.items()
        if path != own and "inductor" in source and "mark.gpu" in source
    }
    assert set(steps.COMPILED) == compiled
    for step in every.planned([*FILES, *steps.COMPILED]):
        limit = "120" if "torch_compile" in step.name else "45"
        assert hang_s(step) in ([], [f"faulthandler_timeout={limit}"]), step.name
    longer = steps.Steps(settings({"HANG_S": "300"}), machine_of(tmp_path))
    for step in longer.planned(steps.COMPILED):
        assert hang_s(step) in ([], ["faulthandler_timeout=300"]), step.name


def test_files_that_need_more_ranks_have_them(every):
    least = re.compile(r"^pytestmark = .*mark\.mpi\(min_size=([3-9])\)", re.MULTILINE)
    for file in listed_files():
        match = least.search((ROOT / file).read_text())
        assert steps.RANKS.get(file, 2) == (int(match[1]) if match else 2), file
    (nn,) = (step for step in every.planned(listed_files()) if step.name == "aware:conformance/nn")
    assert nn.command[nn.command.index("-n") + 1] == "3"


def test_what_is_missing_skips_steps_or_fails_them(tmp_path):
    found = machine_of(tmp_path, ["CUDA_MPI", "pytest"])
    (aware,) = (
        step
        for step in steps.Steps(settings({}), found).planned(FILES)
        if step.name == "aware:nn/a"
    )
    assert steps.first_missing(aware, found) == "CUDA_MPI"
    assert found.optional("CUDA_MPI") and not found.optional("pytest")
    assert found.optional(SANITIZER) and found.optional("MPICH")
    # With no Open MPI at all, nothing of two ranks is tested.
    assert not machine_of(tmp_path, ["CUDA_MPI", "OPENMPI"]).optional("CUDA_MPI")
    # One that is installed and starts no ranks is a failure.
    found.lacks["OPENMPI"] = "its mpirun starts no two ranks"
    assert not found.optional("OPENMPI")


def test_patterns_name_steps():
    assert steps.is_asked("aware:comm/a", []) and steps.is_asked("aware:comm/a", ["x", "aware:*"])
    assert not steps.is_asked("aware:comm/a", ["staged:*"])
    assert steps.short("tests/comm/algorithms/test_device_test_a.py") == (
        "comm/algorithms/device_test_a"
    )
