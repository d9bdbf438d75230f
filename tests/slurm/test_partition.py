"""Partitions from the output of sinfo."""

import pytest

from mpidist.slurm.partition import (
    MemoryLimits,
    NodeKind,
    megabytes,
    parse,
    seconds,
    with_memory_limits,
)

# As printed by Slurm 22.05 and 23.11, with kinds of nodes in one partition.
PRINTED = """\
batch*|up|120|64|2|16|191000|(null)|2-00:00:00
gpu|up|12|128|2|64|515000+|gpu:a100:4(S:0-1),mps:400|1-00:00:00
gpu|up|3|64|2|32|900|gpu:v100:2,gpu:a100:1|1-00:00:00
plain|drain|2|4|4|1|1|gpu:6|infinite
empty|up|0|0|0|0|0|(null)|infinite
"""


# As printed by Slurm 22.05 and 23.11, shortened where nothing is read.
SHOWN = """\
PartitionName=batch AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES \
QoS=N/A DefaultTime=NONE MaxTime=2-00:00:00 MinNodes=0 Nodes=n[001-120] State=UP \
TotalCPUs=7680 TotalNodes=120 JobDefaults=(null) DefMemPerCPU=2900 MaxMemPerNode=180000
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL JobDefaults=DefCpuPerGPU=16 \
DefMemPerNode=64000 MaxMemPerCPU=4000 TRES=cpu=1728,mem=6M,node=15,gres/gpu=57
PartitionName=plain Default=NO DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
PartitionName=other DefMemPerCPU=1
"""


def test_limits_of_memory_come_from_scontrol():
    found = with_memory_limits(parse(PRINTED), SHOWN)
    assert list(found) == list(parse(PRINTED))
    assert found["batch"].memory == MemoryLimits(default_per_cpu=2900, most_per_node=180000)
    assert found["gpu"].memory == MemoryLimits(default_per_node=64000, most_per_cpu=4000)
    assert found["plain"].memory == found["empty"].memory == MemoryLimits()
    assert found["batch"].memory.default_mb(10) == 29000
    assert found["gpu"].memory.default_mb(10) == 64000
    for nothing in ("", "slurm_load_partitions: Unable to contact slurm controller"):
        assert with_memory_limits(parse(PRINTED), nothing) == parse(PRINTED)


def test_kinds_of_nodes_are_kept_apart():
    found = parse(PRINTED)
    assert list(found) == ["batch", "gpu", "plain", "empty"]
    assert found["batch"].is_default and not found["gpu"].is_default
    assert found["batch"].limit_s == 2 * 86400 and found["plain"].limit_s is None
    assert found["gpu"].kinds == [
        NodeKind(12, 128, 2, {"a100": 4}, 515000),
        NodeKind(3, 64, 2, {"v100": 2, "a100": 1}, 900),
    ]
    assert [found["gpu"].kinds[1].gpus_of(name) for name in ("a100", "h100", "")] == [1, 0, 3]
    assert not found["plain"].is_up and found["empty"].kinds == []


def test_a_node_of_which_slurm_knows_the_cpus_alone_has_one_socket_and_any_memory():
    assert parse(PRINTED)["plain"].kinds == [NodeKind(2, 4, 1, {"": 6})]


def test_a_partition_reads_as_what_it_has():
    found = parse(PRINTED)
    assert str(found["gpu"]) == (
        "partition gpu (12 nodes of 128 CPUs, 503 GiB and 4 GPUs a100; "
        "3 nodes of 64 CPUs, 900 MiB and 2 GPUs v100 + 1 GPU a100)"
    )
    assert str(found["empty"]) == "partition empty (no nodes)"
    assert "no GPUs" in str(found["batch"])


@pytest.mark.parametrize(
    "text",
    ["PARTITION AVAIL", "a|up|x|1|1|1|1|(null)|infinite", "a|up|²|1|1", "a|up|1|1|1|1|?|x|1"],
)
def test_another_format_is_refused(text):
    with pytest.raises(ValueError, match="another format"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("30:30", 1830),
        ("1:00:00", 3600),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
        ("infinite", None),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_in_seconds(text, expected):
    assert seconds(text) == expected


def test_an_amount_of_memory_in_mb():
    for text, expected in [("0", 0), ("4000", 4000), ("64G", 65536), ("1T", 1 << 20), ("1500k", 2)]:
        assert megabytes(text) == expected
    assert megabytes("512MB") == 512
