"""Benchmarks: they run, check their results and record what they document. No time is asserted."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpidist import progress_bar
from mpidist.kernels import powersgd, powersgd_launches
from tests.rpc.limits import soon
from tests.test_whole_file import without_room
from tests.tools.support import ROOT, job, launcher, missing, python, python_file, started

BENCHMARKS = ROOT / "benchmarks"
FOUR_WAYS = ["gloo", "mpi4py", "mpidist", "native"]
OPERATIONS = {
    "all_reduce", "all_reduce_bf16", "broadcast", "reduce", "all_gather_into_tensor", "all_gather",
    "reduce_scatter_tensor", "all_to_all_single", "ping_pong", "barrier",
}  # fmt: skip


@pytest.fixture(scope="module")
def _libraries():
    for name in ("matplotlib", "psutil", "rich"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")


@pytest.fixture(autouse=True)
def _found(_libraries, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


# One job for many programs of two ranks, because each would import torch, NumPy and matplotlib
# again. On an idle machine a job takes 25 to 40 s, a fifth of its limit: a machine may be half as
# fast, and other tests run beside it.
_IN_TURN = """
    import runpy, sys
    import torch.distributed as dist
    sys.path.insert(0, {folder!r})
    sys.executable = {interpreter!r}  # of the workers that a benchmark starts
    from harness import pictures, timing
    from training import cases
    # Seconds of each rank of each job, where nothing is timed.
    timing.TOUCHED_BYTES = 1 << 20
    pictures.THEMES = pictures.THEMES[:1]
    cases.MANY_LAYERS = {layers}
    for program, *options in {programs!r}:
        sys.argv = [program, *options]
        runpy.run_path({folder!r} + "/" + program, run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
        print("ended:", program, flush=True)
"""
# Words before the progress bars.
_BARS = {
    "bench_rpc.py": "blocks",
    "bench_autograd.py": "blocks",
    "bench_oss.py": "cases",
    "bench_collectives.py": "all_reduce",
    "bench_ddp.py": "ddp",
}
# A fifth of the benchmarks' own, in as many buckets.
_LAYERS = 24
_TRAINING = ["--models", "many:2", "--rounds", "1", "--bucket-cap-mb", "0.2", "--link", "test"]
_OF_CALLS = [
    ["bench_rpc.py", "--quick"],
    ["bench_rpc_device.py", "--quick", "--device", "cpu"],
    ["tree_job.py", "rpc", "--quick"],
    ["bench_rpc_scale.py", "--quick"],
    ["bench_values.py", "--quick"],
]
_OF_SCALE = [
    ["bench_autograd.py", "--quick"],
    ["bench_autograd_stages.py", "--quick"],
    ["bench_scaling.py", "--quick"],
    ["bench_growth.py", "--quick"],
]
_OF_COLLECTIVES = [
    ["tree_job.py", "collectives", "--quick"],
    ["bench_collectives.py", "--quick", "--rounds", "1"],
    ["bench_execution.py", "--rounds", "1", "--burst-s", "0"],
    ["bench_recorder.py", "--rounds", "2", "--burst-s", "0", "--entries", "100", "--width", "8"],
    ["bench_determinism.py", "--sizes", "8", "65536", "--exact", "65536", "--rounds", "2"],
]
_OF_TRAINING = [
    ["tree_job.py", "ddp", "--quick"],
    ["bench_ddp.py", *_TRAINING],
    ["bench_owners.py", *_TRAINING],
    ["bench_powersgd.py", *_TRAINING],
    ["bench_adaptive.py", "--quick"],
    ["bench_diloco.py", "--quick", "--link", "test"],
    ["bench_ddp_nccl.py", "--models", "many:2", "--rounds", "1", "--device", "cpu"],
]
_OF_OPTIMIZERS = [
    ["bench_oss.py", "--quick"],
    ["bench_oss_state.py", "--quick"],
    ["bench_commits.py", "--quick"],
    ["bench_oss_device.py", "--quick", "--device", "cpu"],
]
_OF_MESSAGES = [
    ["bench_messages.py", "--quick"],
    ["bench_allocate.py", "--quick"],
    ["bench_coupling.py", "--quick"],
    ["bench_device.py", "--quick", "--device", "cpu"],
]


def _run_in_turn(programs, folder):
    """Run programs in one job of two ranks; return the folder of their records, and the output."""
    with_output = [[*program, "--output", str(folder)] for program in programs]
    script = _IN_TURN.format(
        folder=str(BENCHMARKS),
        interpreter=python_file(folder),
        layers=_LAYERS,
        programs=with_output,
    )
    # As `mpidist bench` starts them in a terminal: with progress bars on stderr.
    terminal = {progress_bar.VARIABLE: "1"}
    done = job(2, script, "--bind-to", "none", env=terminal, timeout_s=200)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    for program, *_ in programs:
        if program in _BARS:
            assert re.search(rf"{_BARS[program]} .*100%", done.stderr), program
    return folder, done.stdout


def _job_of(name, programs):
    """Return the fixture ``of_<name>``: the folder of the programs' records, and the output."""

    @pytest.fixture(scope="module", name=f"of_{name}")
    def run(_libraries, tmp_path_factory):
        return _run_in_turn(programs, tmp_path_factory.mktemp(name))

    return run


of_calls = _job_of("calls", _OF_CALLS + _OF_SCALE)
of_collectives = _job_of("collectives", _OF_COLLECTIVES + _OF_MESSAGES)
of_training = _job_of("training", _OF_TRAINING + _OF_OPTIMIZERS)


# A program that starts jobs, by the launchers beside its interpreter.
_BY_ITSELF = """
    import runpy, sys
    sys.path.insert(0, {folder!r})
    sys.executable = {interpreter!r}
    sys.argv = {words!r}
    runpy.run_path({folder!r} + "/" + sys.argv[0], run_name="__main__")
"""


def _run_by_itself(folder, *words):
    """Run a program that starts jobs, and records into a folder; return what it prints.

    The ranks of its jobs import torch no more than those of tests' own do; torchrun's do.
    """
    interpreter, (mpirun, *_) = python_file(folder), launcher(2)
    torchrun = f"PYTHON_EXEC={interpreter} exec {interpreter} -m torch.distributed.run"
    for name, command in (("mpirun", f"exec {mpirun}"), ("torchrun", torchrun)):
        file = folder / name
        file.write_text(f'#!/bin/sh\n{command} "$@"\n')
        file.chmod(0o755)
    script = _BY_ITSELF.format(
        folder=str(BENCHMARKS), interpreter=interpreter, words=[*words, "--output", str(folder)]
    )
    done = job(1, script, command=[], timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def record_of(folder, pattern, *, has_picture=True):
    (path,) = folder.glob(pattern)
    if has_picture:
        assert path.with_suffix(".png").stat().st_size > 0
    return json.loads(path.read_text())


def judged_record_of(folder, pattern, goals):
    """Return a record without a picture, whose results were checked and all goals measured."""
    record = record_of(folder, pattern, has_picture=False)
    verdicts = [goal["verdict"] for goal in record["goals"]]
    assert record["results_checked"] is True and len(verdicts) == goals
    assert "not measured" not in verdicts
    return record


@pytest.mark.long
@pytest.mark.usefixtures("_libraries")
def test_starts_of_whole_jobs_are_timed(tmp_path):
    text = _run_by_itself(tmp_path, "bench_startup.py", "--quick")
    record = record_of(tmp_path, "startup-2.json", has_picture=False)
    assert {"gloo", "mpidist", "gloo, torchrun"} == record["seconds"].keys()
    assert all(len(found) == 1 and found[0] > 0 for found in record["seconds"].values())
    assert "mpidist" in text


@pytest.mark.slow
@pytest.mark.usefixtures("_libraries")
def test_a_recovery_is_timed(tmp_path):
    _run_by_itself(tmp_path, "bench_recovery.py", "--quick")
    ((times,),) = record_of(tmp_path, "recovery-openmpi.json", has_picture=False)[
        "seconds"
    ].values()
    assert 0 < times["error_s"] < times["step_s"]


@pytest.mark.slow
def test_quick_run_records_all_contenders_and_the_environment(of_collectives):
    record = record_of(of_collectives[0], "collectives-*-2.json")
    assert record["results_checked"] is True
    assert {result["operation"] for result in record["results"]} == OPERATIONS
    for result in record["results"]:
        names = list(result["contenders"])
        if result["operation"] == "all_reduce_bf16":
            assert names == ["gloo", "mpidist", "native", "mpidist fp32", "native fp32"]
        else:
            assert names == FOUR_WAYS
        for values in result["contenders"].values():
            assert len(values["rounds_us"]) == record["rounds"]
            assert values["p10_us"] <= values["median_us"] <= values["p90_us"]
    about = record["environment"]
    assert about["ranks"] == 2
    assert len(about["cores_of_ranks"]) == 2
    assert str(ROOT) not in json.dumps(record)
    assert record["goals"]


@pytest.mark.slow
def test_ways_to_execute_are_compared_and_recorded(of_collectives):
    record = record_of(of_collectives[0], "execution-*-2-unbound.json", has_picture=False)
    assert [result["operation"] for result in record["results"]] == ["looks"] + ["latency"] * 4 + [
        "torch",
        "overlap",
        "two threads",
    ]
    assert set(record["results"][1]["contenders"]) == {
        "mpi4py",
        "caller",
        "group's thread",
        "non-blocking",
    }


@pytest.mark.slow
def test_sums_in_rank_order_are_compared_and_recorded(of_collectives):
    record = record_of(of_collectives[0], "determinism-*-2.json", has_picture=False)
    assert [row["bytes"] for row in record["rows"]] == [8, 65536]
    assert all(row["order_us"] > 0 and row["over_plain"] > 0 for row in record["rows"])
    assert [row["bytes"] for row in record["exact"]] == [65536]
    assert all(row["accumulated_over_plain"] > 0 for row in record["exact"])


@pytest.mark.slow
def test_operations_with_the_recorder_and_without_are_compared_and_recorded(of_collectives):
    record = record_of(of_collectives[0], "recorder-*-2.json", has_picture=False)
    assert 0 < record["entry"]["clock_us"] < record["entry"]["us"]
    assert [row["what"] for row in record["rows"]] == [
        "all_reduce of 8 bytes",
        "message of 8 bytes",
        "rpc_sync of a no-op",
        "step of DDP",
    ]


@pytest.mark.slow
def test_node_memory_is_compared_and_recorded(of_collectives):
    record = record_of(of_collectives[0], "allocate-*-2.json", has_picture=False)
    assert [result["operation"] for result in record["results"]] == ["all-gather", "unshard"]
    for result in record["results"]:
        assert set(result["contenders"]) == {"gloo", "mpidist", "node memory"}
        assert len(result["comparisons"]) == 3


@pytest.mark.slow
def test_sharded_steps_are_compared_and_state_bytes_recorded(of_training):
    record = record_of(of_training[0], "oss-[mo]*-2.json", has_picture=False)
    cases = {result["operation"]: result["contenders"] for result in record["results"]}
    assert set(cases) == {
        "Adam, loop",
        "Adam, fused",
        "parts of Adam, loop",
        "parts of Adam, fused",
        "consolidation",
        "Muon",
    }
    ways = ["mpidist", "mpidist balanced", "mpidist flat", "mpidist flat, one copy"]
    assert [name for name in cases["Adam, fused"] if name != "FairScale on Gloo"] == [
        "unsharded", "torch on Gloo", "torch on mpidist", *ways,
    ]  # fmt: skip
    assert set(record["overheads"]) == {
        f"Adam, {kernel}: {way}" for kernel in ("loop", "fused") for way in ways
    }
    # A half and 64 elements; the whole state has two moments and a step count for each parameter.
    held = record["state_bytes"]
    assert all(own <= held["unsharded"][0] / 2 + 8 * 64 + 4 * 6 for own in held["mpidist flat"])
    shares = {
        (row["network"], row["ranks"], row["partition"]): row["over_even"]
        for row in record["state_bytes_by_arithmetic"]
    }
    assert (
        shares["GPT-2 XL", 64, "flat"] < 1.001 < shares["GPT-2 XL", 8, "greedy"]
        and shares["ResNet-50", 8, "balanced"] < 1.02
    )


@pytest.mark.slow
def test_messages_are_compared_and_recorded(of_collectives):
    record = record_of(of_collectives[0], "messages-*-2.json", has_picture=False)
    names = {result["operation"] for result in record["results"]}
    assert {"latency", "exchange", "window", "100 posted tags"} <= names
    assert all(
        set(result["contenders"]) == {"gloo", "mpi4py", "mpidist", "native"}
        for result in record["results"]
    )


@pytest.mark.slow
def test_state_of_the_sharded_optimizer_is_measured_and_recorded(of_training):
    record = record_of(of_training[0], "oss-state-*-2.json", has_picture=False)
    assert record["results_checked"] is True
    ways = {"used again", "fresh", "all ranks"}
    if importlib.util.find_spec("fairscale") is not None:
        ways.add("FairScale on Gloo")
    assert set(record["consolidation_ms"]) == ways
    assert all(len(values) == record["rounds"] for values in record["consolidation_ms"].values())
    assert len(record["goals"]) == 2
    assert len(record["memory_mib"]["to rank 0"]) == 2


@pytest.mark.slow
def test_outer_steps_are_compared_and_recorded(of_training):
    record = record_of(of_training[0], "diloco-*-2-test.json", has_picture=False)
    assert {"bare", "DDP", "DiLoCo", "DiLoCo, PowerSGD rank 4"} <= set(record["times"])
    assert set(record["times"]) == set(record["losses"])
    assert all(row["over_bare"] > 0 for row in record["times"].values())
    assert all(0 < row["loss"] < 10 for row in record["losses"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "owners", "powersgd"])
def test_steps_of_training_are_compared_and_recorded(of_training, name):
    record = record_of(of_training[0], f"{name}-*-2-test*.json")
    (result,) = record["results"]
    contenders = result["contenders"]
    assert result["parameters"] == _LAYERS * (128 * 128 + 128)
    bare = [values["median_us"] for label, values in contenders.items() if label.startswith("bare")]
    assert result["bare_us"] == min(bare)
    if name == "ddp":
        assert {
            "mpidist",
            "noop_hook",
            "torch on mpidist",
            "torch on Gloo",
            "communication alone",
        } <= set(contenders)
    elif name == "owners":
        held = {label: values["gradient_bytes"] for label, values in contenders.items()}
        assert held["to_owners, 1 buffer"] < held["to_owners"] < held["mpidist"]
        assert held["mpidist"] >= held["bare"] == 4 * result["parameters"]
    else:
        sent = {label: values["bytes_sent"] for label, values in contenders.items()}
        assert sent["bf16_compress_hook"] == sent["allreduce_hook"] / 2
        assert sent["PowerSGD rank 1"] < sent["PowerSGD rank 4"] < sent["bf16_compress_hook"]


@pytest.mark.slow
def test_the_adaptive_hook_is_compared_and_recorded(of_training):
    record = record_of(of_training[0], "adaptive-*-2.json", has_picture=False)
    (result,) = record["results"]
    fixed = {"none", "bf16", "uint8", "powersgd-4", "powersgd-1"}
    best = result["best_fixed"]
    others = {"bare", "adaptive", f"{best}, first", f"{best}, again"}
    assert set(result["contenders"]) == fixed | others and best in fixed
    # On one node.
    assert {method for _, method, _ in result["decisions"]} == {"none"}
    assert record["digits"]["accuracies"]["adaptive"] == record["digits"]["accuracies"]["none"]


@pytest.mark.slow
def test_kernels_are_compared_and_recorded(tmp_path):
    command = [
        *python(),
        str(BENCHMARKS / "bench_kernels.py"),
        "--output",
        str(tmp_path),
        "--quick",
    ]
    done = started(command, timeout_s=100, env={progress_bar.VARIABLE: "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copies" in done.stderr and "PowerSGD" in done.stderr
    path = tmp_path / "kernels-cpu.json"
    assert path.with_suffix(".png").stat().st_size > 0
    record = json.loads(path.read_text())
    assert (
        record["results_checked"] is True
        and record["left_out_for_time"] == []
        and len(record["goals"]) == 4
    )
    assert {result["operation"] for result in record["copies"]} == {"pack", "unpack", "accumulate"}
    for result in record["copies"]:
        assert list(result["contenders"]) == ["mpidist", "torch", "device copy"]
        assert result["contenders"]["device copy"]["over_copy"] == 1
        assert len(result["contenders"]["mpidist"]["device"]["rounds_us"]) == record["rounds"]
    for result in record["powersgd"]:
        assert set(result["contenders"]) == {
            "kernels",
            "powerSGD_hook",
            "torch's hook",
            "torch's hook, batched",
        }
        assert (
            result["buckets"] > 1
            and result["matrices"] > 1
            and result["launches_per_bucket"]["kernels"] is None
        )
        assert result["fewest_us"] > 0


@pytest.mark.slow
def test_the_hosts_part_of_a_rank_by_itself(tmp_path):
    """Without a network: no event without communication; one more launch without views."""
    program, networks = str(BENCHMARKS / "bench_host_time.py"), ["--networks", "ResNet-50"]
    done = started(
        [*python(), program, *networks, "--rounds", "1", "--output", str(tmp_path)],
        timeout_s=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = record_of(tmp_path, "host-time-*-1.json", has_picture=False)["results"]
    counts = {(result["hook"], result["gradients"]): result["counts"] for result in results}
    assert counts["average", "views kept"] == {}
    assert counts["average", "views"] == {"kernels": 1} and counts["average", "copied back"] == {
        "kernels": 2
    }
    # The stages run on the group's thread: after the work that the backward pass has queued, and
    # before reads of the gradients.
    thread = {"events": 3, "waits of a stream": 3}
    assert counts["powerSGD", "views kept"] == {"kernels": 5, **thread}
    assert counts["powerSGD", "views"] == {"kernels": 6, **thread}
    assert counts["powerSGD", "copied back"] == {"kernels": 7, **thread}


@pytest.mark.slow
def test_pauses_during_steps_of_optimizers(tmp_path):
    program = str(BENCHMARKS / "bench_optim_pause.py")
    done = started(
        [*python(), program, "--quick", "--threads", "1", "--output", str(tmp_path)],
        timeout_s=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = record_of(tmp_path, "optim-pause-1.json", has_picture=False)["results"]
    fused = {result["optimizer"] for result in results if result["kernel"] == "fused"}
    assert (
        fused == {"SGD", "Adam", "AdamW", "Adagrad"}
        and len({result["optimizer"] for result in results}) == 9
    )
    assert all(
        result["longest pause, ms"] >= result["99 % of pauses below, ms"] for result in results
    )


@pytest.mark.slow
def test_ways_from_device_memory_are_compared_and_recorded(of_collectives):
    record = record_of(of_collectives[0], "device-*-2-cpu.json")
    contenders = {result["operation"]: list(result["contenders"]) for result in record["results"]}
    assert contenders == {
        "all_reduce": ["library", "ring", "staged"],
        "ping_pong": ["library", "staged"],
    }
    assert record["results_checked"] is True and record["operations"] and len(record["goals"]) == 3


@pytest.mark.slow
def test_echoes_of_device_tensors_are_compared_and_recorded(of_calls):
    record = judged_record_of(of_calls[0], "rpc-device-*-2-cpu.json", goals=2)
    sizes = {result["size_bytes"]: set(result["contenders"]) for result in record["results"]}
    assert sizes == {size: {"mpidist", "tensorpipe"} for size in (4 << 10, 1 << 20)}


@pytest.mark.slow
def test_sharded_steps_on_a_device_are_compared_and_recorded(of_training):
    record = judged_record_of(of_training[0], "oss-device-*-2-cpu.json", goals=2)
    (result,) = record["results"]
    ways = {"mpidist", "mpidist flat", "mpidist flat bf16"}
    others = {"Adam", "copies of others' shards", "torch on mpidist"}
    assert set(result["contenders"]) == ways | others and set(result["over_floor"]) == ways


@pytest.mark.slow
def test_steps_beside_nccl_are_compared_and_recorded(of_training):
    """On the CPU Gloo takes NCCL's place."""
    record = judged_record_of(of_training[0], "ddp-nccl-*-2-cpu.json", goals=1)
    (result,) = record["results"]
    assert set(result["contenders"]) == {"torch on gloo", "torch on mpidist", "mpidist", "bare"}


@pytest.mark.slow
def test_calls_are_compared_and_recorded(of_calls):
    record = record_of(of_calls[0], "rpc-[mo]*-2.json", has_picture=False)
    shown = {
        (result["operation"], result["size_bytes"]): set(result["contenders"])
        for result in record["results"]
    }
    assert all(names >= {"tensorpipe", "mpidist", "data only"} for names in shown.values())
    assert {operation for operation, _ in shown} == {
        "no-op", "echo", "async", "remote + to_here", "remote of torch.add + "
                                                      "to_here", "RRef and tensor", "RRef and dict",
        "rref.rpc_sync()", "tensor of many", "many to one",
    }  # fmt: skip
    assert "floor" in shown["no-op", 0] and "ping-pong" in shown["echo", 1024]
    assert "mpidist no-op" in shown["RRef and tensor", 4096]
    judged = [
        goal["verdict"]
        for goal in record["goals"]
        if "4 MiB" not in goal["goal"] and "1000" not in goal["goal"]
    ]
    assert (
        record["results_checked"] is True
        and len(judged) == 14 + len(shown)
        and "not measured" not in judged
    )
    assert set(record["idle_share_of_a_core"]) == {"tensorpipe", "mpidist", "data only"}


@pytest.mark.slow
def test_stages_of_a_distributed_step_are_recorded_with_their_sum(of_calls):
    record = record_of(of_calls[0], "stages-*-2.json", has_picture=False)
    rows = {(row["phase"], row["worker"], row["stage"]): row for row in record["stages"]}
    assert {phase for phase, _, _ in rows} == {"forward", "backward", "step", "context"}
    assert rows["forward", 1, "called function"]["calls"] == 4
    # Gradients that have arrived together are one call, which the pool's threads decide.
    assert all(1 <= rows["backward", worker, "torch's engine"]["calls"] <= 4 for worker in (0, 1))
    assert rows["step", 1, "optimizer"]["calls"] == 1
    own = record["stamps_us"]
    assert record["sum_us"] + own == pytest.approx(sum(row["us"] for row in record["stages"]))
    assert 0 < record["mpi_us"] < record["sum_us"] and record["step_us"] > 0


@pytest.mark.slow
def test_backward_passes_are_compared_and_recorded(of_calls):
    record = record_of(of_calls[0], "autograd-*-2.json", has_picture=False)
    shown = {result["operation"]: set(result["contenders"]) for result in record["results"]}
    assert list(shown) == ["1 layer", "4 layers", "4 layers and step"]
    assert all(names == {"tensorpipe", "mpidist", "smart"} for names in shown.values())
    for result in record["results"]:
        rounds = [len(one["rounds_us"]) for one in result["contenders"].values()]
        assert rounds == [record["blocks"] * record["rounds"]] * 3
    # Four results and three arguments need gradients; the input of the first layer does not.
    fast = {"GRADIENTS": 7, "DONE": 1, "CLEANUP": 1}
    assert record["messages_per_pass"] == {
        "mpidist": fast,
        "smart": {**fast, "ASK": 1, "SUMMARY": 1, "AWAIT": 1},
    }
    assert [one["sources"] for one in record["planning"]] == [1, 3]
    assert all(0 < one["share"] < 1 and one["nodes"] == 401 for one in record["planning"])
    judged = {goal["verdict"] for goal in record["goals"]}
    assert (
        record["results_checked"] is True
        and record["contexts"]["contexts"] == 60
        and "not measured" not in judged
    )


@pytest.mark.slow
def test_arguments_are_written_and_read_by_all_and_recorded(of_calls):
    results = record_of(of_calls[0], "values.json", has_picture=False)["results"]
    assert {"no arguments", "a tensor of 1 KiB", "100 tuples"} < {r["arguments"] for r in results}
    for result in results:
        assert list(result["us"]) == ["mpidist", "with a list", "torch"]
        assert min(result["us"].values()) > 0


def test_a_benchmark_of_two_ranks_says_how_it_is_started(monkeypatch):
    from harness import benchmark_options

    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/bench_rpc.py", "--quick"])
    benchmark_options.require_ranks(2)
    with pytest.raises(SystemExit, match=r"-n 2 python benchmarks/bench_rpc\.py$"):
        benchmark_options.require_ranks(1)


def test_arguments_that_are_read_otherwise_are_an_error(monkeypatch):
    import bench_values

    monkeypatch.setattr(bench_values, "contenders", lambda: {"lossy": lambda call: ((), {})})
    with pytest.raises(RuntimeError, match="lossy read"):
        bench_values.measured(((1, 2), {}), 1, 0.0)


@pytest.mark.slow
def test_start_memory_and_calls_of_all_are_recorded(of_calls):
    measured = record_of(of_calls[0], "rpc-scale-*-2.json", has_picture=False)["contenders"][
        "mpidist"
    ]
    assert (
        min(
            measured[key]
            for key in (
                "start_s",
                "shutdown_s",
                "async_calls_per_s",
                "sync_calls_per_s",
                "sync_median_ms",
            )
        )
        > 0
    )
    assert measured["async_rounds_least"] >= 1


@pytest.mark.slow
def test_a_job_of_the_scaling_benchmark_is_recorded(of_calls):
    record = record_of(of_calls[0], "scaling-*-2.json", has_picture=False)
    assert (record["ranks"], record["nodes"], record["ranks_per_node"], record["machines"]) == (
        2,
        1,
        2,
        1,
    )
    sizes = {(one["operation"], one["nbytes"]) for one in record["collectives"]}
    operations = ("all_reduce", "average", "all_gather", "reduce_scatter", "broadcast")
    assert sizes == {("barrier", 0), *((name, size) for name in operations for size in (8, 2048))}
    assert all(one["us"] > 0 for one in record["collectives"])
    weak, strong = record["steps"]
    assert set(weak["exposed_us"]) == {"none", "bf16", "powersgd-1", "powersgd-4", "powersgd-16"}
    assert (weak["scaling"], weak["batch"], strong["scaling"], strong["batch"]) == (
        "weak",
        2,
        "strong",
        6,
    )
    (bucket,) = weak["buckets"]
    assert bucket["nbytes"] == 4 * weak["parameters"] and 0 < bucket["ready"] < 1
    assert 0 < record["memory"]["pss_mib"] <= record["memory"]["rss_mib"]


@pytest.mark.slow
def test_the_start_of_collectives_is_recorded(tmp_path):
    _run_by_itself(tmp_path, "bench_scaling.py", "startup", "--jobs", "2")
    record = json.loads((tmp_path / "scaling-startup.json").read_text())
    (row,) = record["jobs"]
    assert (
        0 < row["imported_s"] < row["ready_s"]
        and row["mpi4py_ready_s"] > 0
        and row["gloo_start_s"] > 0
    )
    assert row["files"] > 0 and row["threads"] > 0 and row["rss_mib"] > 0
    assert row["group_makers"] > 0 and row["ddp_collectives"] > 0
    assert set(record["growth"].values()) == {"flat"} and record["jobs_without_result"] == {}


@pytest.mark.slow
def test_the_growth_of_costs_is_recorded(of_calls):
    record = record_of(of_calls[0], "growth-*-2.json")
    assert record["results_checked"] is True and len(record["results"]) == 7
    for found in record["results"].values():
        assert list(found) == ["10", "100"]
        assert all(len(times["wall_us"]) == record["rounds"] for times in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, pytest.param(32, marks=pytest.mark.long)])
def test_many_workers_begin_and_end_on_few_cores(ranks):
    script = """
        import mpidist.comm, mpidist.rpc as rpc
        rank, size = mpidist.comm.init().rank, mpidist.comm.init().size
        rpc.init_rpc(f"worker{rank}")
        answers = [rpc.rpc_async(other, max, args=(rank, other)) for other in range(size)]
        assert [answer.wait() for answer in answers] == [max(rank, other) for other in range(size)]
        rpc.shutdown()
        print("ended", rank)
    """
    done = job(ranks, script, timeout_s=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted(
        int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("ended")
    ) == list(range(ranks))


@pytest.mark.slow
def test_a_slow_link_is_made_and_removed(tmp_path):
    """Where namespaces are refused, with status 77, the reason is that of the skip."""
    command = [str(BENCHMARKS / "slow_link.sh"), "1gbit", "echo"]
    before = (
        subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
        if shutil.which("ip")
        else None
    )
    done = subprocess.run(
        [*command, "a", "job"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        assert "slow_link.sh: skipped, " in done.stderr
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split(" : ")  # echo consumed the first -n
    assert first.startswith("1 ip netns exec mpidist-") and first.endswith("-a a job")
    assert second.startswith("-n 1 ip netns exec mpidist-") and second.strip().endswith("-b a job")
    after = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    assert before is not None and after.stdout == before.stdout, "namespaces were left behind"


@pytest.mark.parametrize(
    ("name", "tensors", "numel"),
    [("ResNet-50", 161, 25_557_032), ("BERT-large", 391, 335_141_888), ("GPT-2", 148, 124_439_808)],
)
def test_lists_of_gradients_are_the_networks(name, tensors, numel):
    lists = importlib.import_module("training.gradient_lists")
    shapes = lists.LISTS[name]()
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, numel)


def test_a_list_is_cut_and_begins_again():
    cut = importlib.import_module("training.gradient_lists").cut
    shapes = [(2, 3), (4,)]
    assert cut(shapes, 6) == [(2, 3)] and cut(shapes, 5) == [(5,)]
    assert cut(shapes, 17) == [(2, 3), (4,), (2, 3), (1,)]


def test_the_fewest_bytes_of_powersgd():
    fewest = importlib.import_module("cuda_kernels.powersgd_cases").fewest_bytes
    assert fewest([(100, 200)], 2) == 4 * (7 * 100 * 200 + 5 * 2 * 300)
    assert fewest([(100, 200), (50,)], 2) == fewest([(100, 200)], 2) + 4 * 4 * 50
    assert fewest([(3, 4)], 4) == 4 * 4 * 12  # sent uncompressed, because it would not shrink


def test_growth_is_linear_or_the_step_is_named():
    growth = importlib.import_module("collectives.growth")
    wall = {100: [9.0, 10.0, 11.0], 1000: [14.0, 14.0, 90.0], 10_000: [22.0, 22.0, 22.0]}
    found = {items: {"wall_us": us, "cpu_us": us} for items, us in wall.items()}
    assert growth.verdict(found) == "1000 to 10000: 1.57"
    del found[10_000]
    assert growth.verdict(found) == "linear"
    assert growth.numbers(100, 10_000) == [100, 1000, 10_000]


def test_a_loss_and_a_wrong_factor_are_found():
    powersgd_cases = importlib.import_module("cuda_kernels.powersgd_cases")
    (bucket,) = powersgd_cases.buckets_of([(60, 70), (9,)], 1 << 20, torch.device("cpu"))
    factors = powersgd_cases._factors(bucket, 2)
    powersgd_cases._check_kernels("it", [factors])
    (x,) = factors.bucket.matrices
    total, old_q = x.m.double() + x.e.double(), x.q.double().clone()
    powersgd_cases._stages_of(factors)()
    assert max(powersgd_cases._distances(x, total, old_q).values()) < 1e-4
    x.q.mul_(1.01)
    wrong = {
        what
        for what, distance in powersgd_cases._distances(x, total, old_q).items()
        if distance > 1e-3
    }
    assert wrong == {"Q = Xᵀ·P", "M = P·Qᵀ"}


def test_launches_of_a_bucket_are_counted(monkeypatch):
    powersgd_cases = importlib.import_module("cuda_kernels.powersgd_cases")
    monkeypatch.setattr(powersgd, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(powersgd_launches, "launch", lambda *args: None)
    (bucket,) = powersgd_cases.buckets_of([(60, 70), (9,), (80, 50)], 1 << 20, torch.device("cpu"))
    calls = [powersgd_cases._stages_of(powersgd_cases._factors(bucket, 2))]
    most_launches = importlib.import_module("cuda_kernels.launches").most_launches
    assert most_launches(calls, torch.device("cuda")) == 5
    assert most_launches(calls, torch.device("cpu")) is None


def test_a_head_start_grows_until_the_host_is_ahead(monkeypatch):
    devices, timing = (
        importlib.import_module("harness.devices"),
        importlib.import_module("harness.timing"),
    )
    naps, enough = [], 1 << 22

    def event(enable_timing):
        times = {
            "record": lambda: None,
            "synchronize": lambda: None,
            "elapsed_time": lambda last: 3.0,
        }
        return SimpleNamespace(query=lambda: naps[-1] < enough, **times)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "_sleep", naps.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clock = devices.HeadStart(torch.device("cuda"))
    assert clock(None, timing.Contender("it", (lambda: None,), ()), 2) == pytest.approx(3e-3)
    assert naps == [1 << 20, 1 << 21, 1 << 22] and not clock.behind
    enough = 1 << 40
    clock(None, timing.Contender("late", (lambda: None,), ()), 2)
    before = len(naps)
    clock(None, timing.Contender("late", (lambda: None,), ()), 2)
    assert clock.behind == {"late"} and len(naps) == before + 1


def test_kernel_goals_are_reached_missed_or_not_measured():
    report = importlib.import_module("cuda_kernels.goals")
    values = [("a", 1.0), ("b", 0.5)]
    assert report.judge_cases("it", values, 0.5, True)["verdict"] == "reached"
    missed = report.judge_cases("it", values, 0.8, True)
    assert (missed["verdict"], missed["worst_case"], missed["missed"]) == (
        "not reached",
        "b",
        ["b"],
    )
    assert report.judge_cases("it", values, 1, False)["worst"] == 1.0
    assert [one["verdict"] for one in report.judge([], [])] == ["not measured"] * 4


def test_a_wrong_result_is_found():
    cases, timing = (
        importlib.import_module("collectives.cases"),
        importlib.import_module("harness.timing"),
    )

    class OneRank:
        rank = 0
        raw = SimpleNamespace(allgather=lambda found: [found])

    def case(added: list[float]):
        tensor = torch.empty(2)
        contender = timing.Contender("it", (lambda: tensor.add_(torch.tensor(added)),), (tensor,))
        inputs = [(tensor, np.array([1.0, 2.0], dtype=np.float32))]
        return cases.Case(
            "add", 2, [contender], inputs, lambda k: np.array([2.0, 3.0], dtype=np.float32)
        )

    assert case([1.0, 1.0]).wrong(OneRank) == []
    assert case([1.0, 2.0]).wrong(OneRank) == ["it (call 0) on rank 0"]


class _Here:
    """Makes calls in this process; ``damage`` is applied to each result."""

    def __init__(self, damage):
        self.damage = damage

    def rpc_sync(self, to, function, args=(), kwargs=None):
        return self.damage(function(*args, **(kwargs or {})))

    def rpc_async(self, to, function):
        return SimpleNamespace(wait=lambda: self.rpc_sync(to, function))

    def remote(self, to, function, args=()):
        value = function(*args)
        proxy = SimpleNamespace(forward=lambda tensor: self.damage(value.forward(tensor)))
        return SimpleNamespace(
            to_here=lambda: self.damage(value), local_value=lambda: value, rpc_sync=lambda: proxy
        )


def _damaged(result):
    if isinstance(result, torch.Tensor):
        return result + 1
    if isinstance(result, list):
        return [_damaged(one) for one in result]
    if isinstance(result, dict):
        return {name: _damaged(one) for name, one in result.items()}
    return 0 if result is None else result + 1


def test_a_wrong_result_of_a_call_is_found():
    made = importlib.import_module("rpc.cases").cases((1024,), 3, 1, (1, 10))
    alone = [case for case in made if case.operation != "many to one"]
    assert len(alone) == len(made) - 1
    for case in alone:
        assert case.is_right(case.make(_Here(lambda result: result), "worker1")()), case.operation
        assert not case.is_right(case.make(_Here(_damaged), "worker1")()), case.operation


def test_wrong_gradients_and_parameters_are_found():
    cases = importlib.import_module("rpc.autograd_cases")
    right = [[parameter.detach() for parameter in cases.Layer(0).linear.parameters()]]
    stack = SimpleNamespace(name="it")
    cases._compare(stack, [[one.clone() for one in right[0]]], right)
    with pytest.raises(RuntimeError, match="wrong result of it"):
        cases._compare(stack, [[right[0][0], right[0][1] + 1e-3]], right)
    assert not torch.equal(cases.Layer(1).linear.weight, cases.Layer(0).linear.weight)


def test_trainers_take_part_from_three_workers_on():
    cases = importlib.import_module("rpc.autograd_cases")
    names = [case.operation for case in cases.cases((1, 4, 32), 2)]
    assert names == ["1 layer", cases.FEW, "32 layers", cases.STEP]
    assert [case.operation for case in cases.cases((1, 4, 32), 3)] == [*names, cases.TRAINERS]


def test_cases_are_chosen_with_what_they_are_held_against():
    rpc_cases = importlib.import_module("rpc.cases")
    made = rpc_cases.cases((1024,), 3, 1, (1, 10, 100))

    def taken(*names):
        return [(case.operation, case.size_bytes) for case in rpc_cases.chosen(made, names)]

    assert taken("RRef and") == [("no-op", 0), ("RRef and tensor", 4096), ("RRef and dict", 4096)]
    assert taken("async", "echo") == [("echo", 1024), ("async", 0)]
    assert taken("nothing") == [] and len(taken()) == len(made)
    ((_, fewer),) = made[-2].against
    assert made[-2].size_bytes == 6400 and fewer.size_bytes == 640


def test_a_job_over_its_limit_is_ended():
    run_limited = importlib.import_module("scaling.jobs").run_limited
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], {}, 60)[0] == 3
    assert run_limited([sys.executable, "-c", "import time; time.sleep(600)"], {}, 0.2)[0] is None
    with pytest.raises(FileNotFoundError):
        run_limited(["no-program"], {}, 60)
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_comparison_takes_rounds_as_pairs():
    timing = importlib.import_module("harness.timing")
    left = timing.Series("left", 1, 1, (10.0, 20.0, 90.0))
    right = timing.Series("right", 1, 1, (1.0, 4.0, 30.0))
    comparison = timing.compare(left, right)
    assert comparison.ratio_of_rounds == 5.0  # of 10, 5, 3
    assert comparison.ratio_of_medians == 5.0  # 20 / 4
    assert comparison.difference_of_rounds_us == 16.0  # of 9, 16, 60
    assert timing.Series("x", 1, 1, (3.0, 1.0, 2.0)).median_us == 2.0


def test_every_contender_opens_a_round_equally_often():
    timing = importlib.import_module("harness.timing")
    orders = [timing._order(4, round_number) for round_number in range(8)]
    assert [order[0] for order in orders] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_goals_are_reached_missed_or_not_measured():
    goals = importlib.import_module("harness.goals")

    def barrier(ratio: float) -> dict:
        comparison = {"left": "gloo", "right": "mpidist", "ratio_of_rounds": ratio}
        return {"operation": "barrier", "size_bytes": 0, "comparisons": [comparison]}

    def verdict(results: list) -> dict:
        return next(one for one in goals.judge(results) if one["goal"].startswith("barrier"))

    assert verdict([barrier(2.0)])["verdict"] == "reached"
    assert verdict([barrier(2.0), barrier(0.5)])["verdict"] == "not reached"
    assert verdict([barrier(2.0), barrier(0.5)])["worst"] == 0.5
    assert verdict([])["verdict"] == "not measured"
    assert [goals.judge_below("it", value, 0.5)["verdict"] for value in (0.4, 0.5, None)] == [
        "reached",
        "not reached",
        "not measured",
    ]


def test_a_record_is_plotted_later_where_matplotlib_is_missing(tmp_path, monkeypatch, capsys):
    import plots

    path = tmp_path / "owners-openmpi-2.json"
    shutil.copy(BENCHMARKS / "results" / path.name, path)
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        plots.main([str(path)])
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not path.with_suffix(".png").exists()
    plots.main([str(path)])
    names = f"{path.stem}.png", f"{path.stem}-dark.png"
    assert f"{path.name}, {', '.join(names)}" in capsys.readouterr().out
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    path.write_text('{"benchmark": "startup"}')
    with pytest.raises(ValueError, match="'startup' have no plot"):
        plots.main([str(path)])


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path):
    report = importlib.import_module("harness.report")
    path = tmp_path / "a.json"
    report.write_json({"a": 1}, path)
    with without_room(), pytest.raises(OSError, match=str(path)):
        report.write_json({"a": 2}, path)
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_jobs_of_a_sweep_without_a_traceback(tmp_path, number):
    job = tmp_path / "job"
    job.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/started\nexec sleep 600\n")
    job.chmod(0o755)
    command = [sys.executable, str(BENCHMARKS / "bench_scaling.py"), "sweep", "--jobs", "2"]
    command += ["--launcher", str(job), "--links", "--output", str(tmp_path / "records")]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 60
        started_file = tmp_path / "started"
        while not started_file.exists() or not started_file.read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and b"Traceback" not in said, said
    # One that was killed is there until process 1 has read its status.
    assert soon(lambda: not Path(f"/proc/{started_file.read_text().strip()}/exe").exists())
