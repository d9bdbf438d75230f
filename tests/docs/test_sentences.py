"""Figures in sentences and tables of the pages: those of the records that they are taken from."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from tests.tools.support import ROOT


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def median_ms(result: dict[str, Any], contender: str) -> float:
    return result["contenders"][contender]["median_us"] / 1e3


def digits(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:#.3g}".rstrip(".")


def of_several_programs() -> list[str]:
    found = {one["size_bytes"]: one for one in read("coupling-openmpi-2")["results"]}
    large, middle, small = (
        {name: median_ms(found[size], name) for name in ("mpidist", "mpi4py", "redis")}
        for size in (16 << 20, 1 << 20, 8)
    )
    rate = (16 << 20) / large["mpidist"] / 1e6
    return [
        f"cores: {large['mpidist']:.1f} ms each ({rate:.1f} GB/s), {large['mpi4py']:.1f} ms by",
        f"{large['redis']:.0f} ms by SET and GET of Redis",
        f"1 MiB takes {middle['mpidist']:.2f} ms (mpi4py {middle['mpi4py']:.2f}, Redis "
        f"{middle['redis']:.1f}), one of 8 bytes {small['mpidist']:.2f} ms "
        f"({small['mpi4py']:.2f} and {small['redis']:.1f})",
    ]


def of_rpc() -> list[str]:
    (no_op,) = (one for one in read("rpc-openmpi-2")["results"] if one["operation"] == "no-op")
    return [f"A no-op takes {1e3 * median_ms(no_op, 'mpidist'):.0f} µs between two ranks"]


def of_process_group() -> list[str]:
    found = read("recorder-openmpi-2")
    entry, rows = found["entry"], {one["what"]: one for one in found["rows"]}
    reduced = rows["all_reduce of 8 bytes"]
    return [
        f"an entry took {entry['us']:.2f} µs, of which the clock, read twice, "
        f"{entry['clock_us']:.2f}",
        f"an all-reduce of 8 bytes {reduced['ratio']:.2f} of the time without the recorder "
        f"({reduced['on_us']:.1f} µs, not {reduced['off_us']:.1f}), a message of 8 bytes "
        f"{rows['message of 8 bytes']['ratio']:.2f}, a no-op of RPC "
        f"{rows['rpc_sync of a no-op']['ratio']:.2f}; a step of DDP "
        f"({rows['step of DDP']['ratio']:.2f})",
    ]


def of_figures() -> list[str]:
    ratios = [
        pair["ratio_of_rounds"]
        for one in read("collectives-openmpi-2")["results"]
        if one["operation"] == "all_reduce_bf16" and one["numel"] >= 1024
        for pair in one["comparisons"]
        if pair["right"].endswith("fp32")
    ]
    return [f"bf16 takes {min(ratios):.1f} to {max(ratios):.1f} of the time of as many fp32"]


def of_outer_steps() -> list[str]:
    found = read("diloco-mpich-2-1gbit")
    times, losses = found["times"], {name: one["over_ddp"] for name, one in found["losses"].items()}
    step_s = times["bare"]["median_us"] / 1e6
    link_s = 4 * 8.4e6 * 8 / 1e9
    over = {name: f"{one['over_bare']:.2f}" for name, one in (times | found["floors"]).items()}
    plain, coarse, fine = (
        f"DiLoCo{name}" for name in ("", ", PowerSGD rank 1", ", PowerSGD rank 4")
    )
    halves = "DiLoCo, 2 fragments, overlap H/4"
    return [
        f"take {link_s:.2f} s at 1 Gbit/s: {1 + link_s / found['every'] / step_s:.2f} with steps "
        f"of {1e3 * step_s:.0f} ms",
        f"| `DiLoCo` | {over[plain]} | 1/50 | {losses[plain]:.3f} |",
        f"| PowerSGD rank 1, rank 4 | {over[coarse]}, {over[fine]} | 1/16900, 1/5700 | "
        f"{losses[coarse]:.2f}, {losses[fine]:.2f} |",
        f"| bf16, 2 fragments, overlap H / 4 | {over[halves]} | 1/100 | {losses[halves]:.3f} |",
        f"| torchft | {over['torchft']} | 1/50 | {losses['torchft']:.3f} |",
        f"| one all-reduce every H, by MPICH | {over['MPI_Allreduce']} | 1/50 | |",
    ]


def of_choice() -> list[str]:
    node = {one["model"]: one for one in read("ddp-openmpi-2")["results"]}
    link = {one["model"]: one for one in read("ddp-mpich-2-1gbit-cap4")["results"]}
    found = []
    for case, result in (
        ("DDP step, MLP of 8.4 M, batch 64, two ranks on a node", node["MLP 8.4 M, batch 64"]),
        ("the same, batch 256", node["MLP 8.4 M, batch 256"]),
        ("240 small tensors, batch 256", node["240 tensors, batch 256"]),
        ("transformer of 3.2 M, batch 8", node["transformer 3.2 M, batch 8"]),
        ("MLP, batch 256, a link of 1 Gbit/s between two nodes", link["MLP 8.4 M, batch 256"]),
        ("the same, batch 1024", link["MLP 8.4 M, batch 1024"]),
    ):
        names = ("mpidist", "torch on Gloo", "bare")
        row = " | ".join(f"{digits(median_ms(result, name))} ms" for name in names)
        found.append(f"| {case} | {row}")
    return found


def of_when_ranks_die() -> list[str]:
    seconds = read("recovery-openmpi")["seconds"]

    def row(case: str, way: str, name: str, places: int = 2) -> str:
        found = [one[name] for one in seconds[way]]
        return f"| {case} | {statistics.median(found):.{places}f} | {max(found):.{places}f} |"

    return [
        row("to the error on the last survivor", "mpidist", "error_s"),
        row("to the first new step", "mpidist", "step_s"),
        row("to the first new step, torchrun", "gloo", "step_s", 1),
        row("to the first new step, `--restarts`", "restarts", "step_s", 1),
        row("a cold start of the same ranks, to the first step", "restarts", "cold_s", 1),
    ]


@pytest.mark.parametrize(
    "sentences",
    [
        of_several_programs,
        of_rpc,
        of_process_group,
        of_figures,
        of_outer_steps,
        of_choice,
        of_when_ranks_die,
    ],
)
def test_a_page_says_what_its_record_has(sentences):
    name = sentences.__name__.removeprefix("of_").replace("_", "-")
    page = " ".join((ROOT / "docs" / f"{name}.md").read_text("utf-8").split())
    assert [one for one in sentences() if one not in page] == []
