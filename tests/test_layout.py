"""Layout of the tests: each module has a test file of its name, or an entry in this table."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Modules that are tested only through others, and the test file that fails if they are wrong.
COVERED_BY = {
    "autograd/initiator": "autograd/test_engine.py",
    "autograd/parts": "autograd/test_engine.py",
    "autograd/reductions": "autograd/test_data_parallel.py",
    "checkpoint/reading": "checkpoint/test_hostile.py",
    "checkpoint/saving": "checkpoint/test_training.py",
    "__main__": "cli/test_run.py",
    "cli/app": "cli/test_command.py",
    "cli/device_findings": "cli/test_findings.py",
    "cli/mpi_facts": "cli/test_doctor.py",
    "cli/node_findings": "cli/test_findings.py",
    "cli/questions": "cli/test_doctor.py",
    "c10d/calls": "c10d/test_process_group.py",
    "c10d/collectives": "integration/test_torch_api.py",
    "c10d/generation": "c10d/test_mixed.py",
    "c10d/work_registry": "c10d/test_functional.py",
    "c10d/up_to_213/batches": "c10d/up_to_213/test_mixed.py",
    "c10d/up_to_213/device_backend": "c10d/test_mpi_backend.py",
    "c10d/up_to_213/functional": "c10d/test_functional.py",
    "c10d/up_to_213/process_group": "integration/test_torch_api.py",
    "comm/mpi/communicator": "comm/test_collectives.py",
    "comm/group_types": "comm/test_group.py",
    "comm/messages/object_messages": "comm/test_objects.py",
    "comm/algorithms/sendrecv": "comm/test_collectives.py",
    "comm/algorithms/device_all_reduce": "comm/algorithms/test_device_collectives.py",
    "comm/algorithms/movement": "comm/test_collectives.py",
    "comm/algorithms/tuning_runs": "comm/algorithms/test_tuning.py",
    "comm/messages/request_work": "comm/messages/test_p2p.py",
    "ddp/autograd_context": "autograd/test_data_parallel.py",
    "ddp/backward_pass": "ddp/test_reducer.py",
    "frameworks/environment": "frameworks/test_lightning.py",
    "frameworks/group": "frameworks/test_lightning.py",
    "kernels/powersgd_launches": "kernels/test_powersgd.py",
    "nn/batch_function": "nn/test_sync_batch_norm.py",
    "nn/batch_kernels": "nn/test_sync_batch_norm.py",
    "optim/local": "optim/test_distributed_optimizer.py",
    "rpc/calls/engine_messages": "rpc/threads/test_interceptor.py",
    "rpc/calls/reader": "rpc/calls/test_wire.py",
    "rpc/calls/references": "rpc/test_rref.py",
    "rpc/serving/methods": "rpc/test_data_only_workers.py",
    "rpc/threads/call": "rpc/threads/test_polling.py",
    "rpc/agent": "rpc/test_api.py",
    "c10d/backend": "integration/test_torch_groups.py",
    "c10d/up_to_213/dispatched": "integration/test_torch_profiler.py",
    "c10d/up_to_213/overrides": "integration/test_torch_api.py",
    "tune": "comm/algorithms/test_tuning.py",
}


def modules(root: Path) -> list[str]:
    """Return the modules that have code, as paths without suffix; `__init__` files only import."""
    files = sorted((root / "mpidist").rglob("*.py"))
    return [
        file.relative_to(root / "mpidist").with_suffix("").as_posix()
        for file in files
        if file.stem != "__init__"
    ]


def complaints(root: Path, covered_by: dict[str, str]) -> list[str]:
    """Return one line for each module that breaks the rule."""
    found = []
    names = modules(root)
    for name in names:
        own = root / "tests" / Path(name).parent / f"test_{Path(name).name}.py"
        other = covered_by.get(name)
        if own.exists() and other is not None:
            found.append(f"{name} has {own.name}: take its line out of COVERED_BY")
        elif not own.exists() and other is None:
            found.append(
                f"{name} has no tests/{own.relative_to(root / 'tests')}: write it, or say in "
                "COVERED_BY what tests it"
            )
        elif other is not None and not (root / "tests" / other).exists():
            found.append(f"{name} is said to be covered by tests/{other}, which does not exist")
    return found + [
        f"{name} is in COVERED_BY, and is no module"
        for name in sorted(set(covered_by) - set(names))
    ]


def test_every_module_has_its_tests():
    assert not (found := complaints(ROOT, COVERED_BY)), "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("files", "covered_by", "words"),
    [
        (["mpidist/comm/ring.py"], {}, "no tests/comm/test_ring.py"),
        (
            ["mpidist/comm/ring.py", "tests/comm/test_ring.py"],
            {"comm/ring": "comm/test_ring.py"},
            "take its line out",
        ),
        (
            ["mpidist/comm/ring.py"],
            {"comm/ring": "comm/test_gone.py"},
            "test_gone.py, which does not exist",
        ),
        (["mpidist/__init__.py"], {"comm/gone": "comm/test_gone.py"}, "is no module"),
    ],
)
def test_what_breaks_the_rule_is_named(tmp_path, files, covered_by, words):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (line,) = complaints(tmp_path, covered_by)
    assert words in line
