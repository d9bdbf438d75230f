"""Shape of a job: defaults from a partition, and limits above which it never starts."""

import re
from dataclasses import replace

import pytest

from mpidist.slurm.job_shape import (
    Shape,
    completed,
    cpus_for_memory,
    objections,
    own_objections,
    shape_of,
)
from mpidist.slurm.partition import MemoryLimits, NodeKind, Partition

SHIPPED = {"nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "1", "cpus-per-task": "4"}
RPC = {**SHIPPED, "ntasks-per-node": "2", "gpus-per-node": "2"}
CPU = Partition("cpu", True, True, 3600, [NodeKind(8, 48, 2)])
GPU = Partition("gpu", False, True, None, [NodeKind(6, 64, 2, {"a100": 4})])
ONE = Partition("one", False, True, None, [NodeKind(3, 8, 1, {"": 1})])
LARGE = Partition(
    "large", False, True, None, [NodeKind(6, 64, 2, {}, 128000), NodeKind(2, 32, 2, {"": 4}, 64000)]
)
MIXED = Partition("mixed", False, True, None, [NodeKind(9, 96, 2), NodeKind(2, 16, 2, {"v100": 8})])


def fits(header, partition):
    """Return whether a partition has the nodes of a job."""
    shape = shape_of(header)
    fitting = [
        kind
        for kind in partition.kinds
        if shape.ranks * shape.cpus <= kind.cpus
        and (shape.gpus or 0) <= kind.gpus_of(shape.gpu_type)
        and (not kind.memory_mb or shape.memory_mb <= kind.memory_mb)
    ]
    return shape.nodes <= sum(kind.nodes for kind in fitting)


@pytest.mark.parametrize(
    ("name", "given", "shipped", "partition", "expected"),
    [
        ("ddp", {}, SHIPPED, GPU, Shape(1, 4, 4, 4)),
        ("ddp", {}, SHIPPED, CPU, Shape(1, 2, 24, 0)),
        ("ddp", {}, SHIPPED, None, Shape(1, 1, 4, 1)),
        ("ddp", {"gpus-per-node": "3"}, SHIPPED, None, Shape(1, 3, 4, 3)),
        ("ddp", {"gpus-per-node": "0"}, SHIPPED, None, Shape(1, 1, 4, 0)),
        ("ddp", {"gpus-per-node": "a100:2"}, SHIPPED, GPU, Shape(1, 2, 4, 2, "a100")),
        ("ddp", {"ntasks-per-node": "2"}, SHIPPED, GPU, Shape(1, 2, 4, 2)),
        ("ddp", {"ntasks": "8", "nodes": "2"}, SHIPPED, GPU, Shape(2, 4, 4, 4)),
        ("ddp", {"gpus-per-node": "0"}, SHIPPED, GPU, Shape(1, 2, 32, 0)),
        ("ddp", {"ntasks-per-node": "16"}, SHIPPED, CPU, Shape(1, 16, 3, 0)),
        ("ddp", {"gres": "gpu:2", "ntasks-per-node": "2"}, SHIPPED, GPU, Shape(1, 2, 4, None)),
        # A sweep's tasks are jobs of their own.
        ("array", {}, SHIPPED, GPU, Shape(1, 1, 4, 1)),
        ("array", {}, SHIPPED, CPU, Shape(1, 1, 4, 0)),
        # Few CPUs for each GPU.
        ("ddp", {}, SHIPPED, ONE, Shape(1, 1, 4, 1)),
        ("ddp", {"gpus-per-node": "8"}, SHIPPED, MIXED, Shape(1, 8, 2, 8)),
        # As many nodes as the script's two ranks need.
        ("rpc", {}, RPC, ONE, Shape(2, 1, 4, 1)),
        ("rpc", {}, RPC, GPU, Shape(1, 4, 4, 4)),
        ("test", {}, {**SHIPPED, "nodes": "2"}, GPU, Shape(2, 4, 4, 4)),
        # No more CPUs and GPUs than there is memory for; nodes of the kind with the memory.
        ("ddp", {"mem": "100G"}, SHIPPED, LARGE, Shape(1, 2, 32, 0, "", 102400)),
        ("ddp", {"mem-per-cpu": "4000"}, SHIPPED, LARGE, Shape(1, 2, 16, 0, "", 128000)),
        (
            "ddp",
            {"gpus-per-node": "4", "mem-per-gpu": "16000M"},
            SHIPPED,
            LARGE,
            Shape(1, 4, 4, 4, "", 64000),
        ),
        (
            "ddp",
            {"mem-per-gpu": "30000"},
            SHIPPED,
            replace(LARGE, kinds=LARGE.kinds[1:]),
            Shape(1, 2, 4, 2, "", 60000),
        ),
        ("ddp", {"mem": "0"}, SHIPPED, LARGE, Shape(1, 2, 32, 0)),
        # Slurm was not told the memory.
        ("ddp", {"mem": "900G"}, SHIPPED, CPU, Shape(1, 2, 24, 0, "", 921600)),
    ],
)
def test_what_is_left_open_is_the_partitions(name, given, shipped, partition, expected):
    header = {**shipped, **completed(name, given, shipped, partition)}
    assert shape_of(header) == expected
    assert own_objections(header) == []
    assert partition is None or (fits(header, partition) and not objections(header, partition))


def test_a_limit_left_open_is_within_the_partitions():
    shipped = {**SHIPPED, "time": "01:00:00"}
    short = Partition("debug", False, True, 1800, [NodeKind(1, 8, 1, {"": 1})])
    assert completed("ddp", {}, shipped, short)["time"] == "30"
    assert "time" not in completed("ddp", {}, shipped, CPU)
    assert "time" not in completed("ddp", {}, shipped, GPU)
    assert completed("ddp", {"time": "45"}, shipped, short)["time"] == "45"


@pytest.mark.parametrize(
    "kinds", [[NodeKind(2, 8, 2)], [NodeKind(1, 4, 1, {"": 2})], [NodeKind(1, 4, 1, {"": 6})]]
)
def test_defaults_never_meet_an_objection(kinds):
    partition = Partition("any", True, True, None, kinds)
    for shipped in (SHIPPED, RPC, {**SHIPPED, "nodes": "2"}):
        for name in ("ddp", "array"):
            header = {**shipped, **completed(name, {}, shipped, partition)}
            assert own_objections(header) + objections(header, partition) == []
            assert fits(header, partition)


def test_a_limit_above_the_partitions_is_refused_with_the_option():
    header = {**SHIPPED, **completed("ddp", {"time": "2:00:00"}, SHIPPED, CPU)}
    (text,) = objections(header, CPU)
    assert text == "--time 2:00:00 is above its limit: at most --time 60"
    assert objections({**header, "time": "60"}, CPU) == objections(header, GPU) == []


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"ntasks-per-node": "4", "gpus-per-node": "2"}, "--ntasks-per-node 2, or --gpus-per-node"),
        ({"gpus-per-task": "1"}, "--gpus-per-task hides the GPUs"),
        ({"gpu-bind": "none"}, "--gpu-bind hides the GPUs"),
        ({"ntasks": "2", "nodes": "3"}, "2 ranks cannot be on 3 nodes: --nodes 2"),
        ({"signal": "USR1@120", "time": "2"}, "SIGUSR1 comes 120 s before .* of 120 s.*--time 7"),
        ({"signal": "B:USR1@300", "time": "5"}, "signal=USR1@75"),
    ],
)
def test_what_ends_at_once_on_every_cluster(header, words):
    with pytest.raises(AssertionError, match=words):
        assert not own_objections(header), "; ".join(own_objections(header))


def test_what_is_sound_has_no_objection():
    for header in (
        {"signal": "USR1@120", "time": "3"},
        {"signal": "USR1", "time": "10"},
        {"ntasks-per-node": "2", "gpus-per-node": "4"},
        {"ntasks-per-node": "9"},
    ):
        assert own_objections(header) == []


@pytest.mark.parametrize(
    ("limits", "asked", "reason"),
    [
        ({"most_per_node": 48000}, {"mem": "60G"}, "jobs get at most 48000M: --mem 48000M"),
        ({"most_per_node": 48000}, {"mem": "48000"}, ""),
        # All of the node, as sbatch reads it.
        ({"most_per_node": 48000}, {"mem": "0"}, ""),
        ({"most_per_node": 48000}, {"mem-per-cpu": "4000"}, "--mem-per-cpu 3000M"),
        # Slurm would take more CPUs for it than a node has.
        ({"most_per_cpu": 1000}, {"mem": "100G"}, "at most 64000M: --mem 64000M"),
        ({"most_per_cpu": 2000}, {"mem": "100G"}, ""),
    ],
)
def test_limits_of_the_partitions_memory(limits, asked, reason):
    partition = replace(LARGE, kinds=LARGE.kinds[:1], memory=MemoryLimits(**limits))
    header = {"nodes": "1", "ntasks-per-node": "2", "cpus-per-task": "8", **asked}
    found = objections(header, partition)
    if not reason:
        assert found == []
        return
    (text,) = found
    assert re.search(reason, text), text


def test_a_job_gets_the_cpus_of_its_memory():
    partition = replace(LARGE, memory=MemoryLimits(most_per_cpu=2000))
    assert cpus_for_memory(Shape(1, 2, 8, 0, "", 102400), partition) == 52
    assert cpus_for_memory(Shape(1, 2, 8, 0, "", 32000), partition) == 16
    assert cpus_for_memory(Shape(1, 2, 8, 0, "", 102400), LARGE) == 16
