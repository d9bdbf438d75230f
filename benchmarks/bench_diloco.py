"""Time a step with outer steps every H against one without communication; compare losses.

mpirun --bind-to none -n 2 python benchmarks/bench_diloco.py
benchmarks/slow_link.sh 1gbit MPIRUN python benchmarks/bench_diloco.py    (MPICH's mpirun)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import benchmark_options, environment, report, tables, timing
from mpidist import ddp
from training import cases

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from outer_steps import NextWord, batch
from text_training import Words, library_text

Module = torch.nn.Module
# From a module and its inner optimizer to the module that is called, and what ends the training.
Attach = Callable[[Module, torch.optim.Optimizer], tuple[Module, Callable[[], object]]]

_MARGIN = 1.02
_LONGEST_AVERAGE_S = 1.0
_LEARNING_RATE = 3e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp:64", metavar="NAME:BATCH", help="that is timed")
    parser.add_argument("--every", type=int, default=50, help="H")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500, help="of the trainings on text")
    benchmark_options.add_link(parser)
    benchmark_options.add_quick(parser)
    benchmark_options.add_output(parser)
    options = parser.parse_args()
    if options.quick:
        options.model, options.every, options.rounds, options.steps = "many:2", 4, 1, 8
    torch.set_num_threads(1)
    dist.init_process_group("mpidist")
    from mpi4py import MPI

    raw = MPI.COMM_WORLD.Dup()
    benchmark_options.require_two_ranks(raw.Get_size())
    about = environment.describe(raw)
    timing.touch_memory()
    times = time_steps(raw, options)
    losses = compare_losses(raw, options)
    if raw.Get_rank() == 0:
        print(_table(times, losses))
        parts = ["diloco", environment.library_name(about), str(about["ranks"]), options.link]
        record = {
            "benchmark": "diloco", "link": options.link, "environment": about,
            "model": options.model, "every": options.every, "rounds": options.rounds,
            "steps_on_text": options.steps, "results_checked": True, "times": times,
            "losses": losses,
        }  # fmt: skip
        report.write_json(record, options.output / f"{'-'.join(filter(None, parts))}.json")
    raw.Barrier()
    raw.Free()
    dist.destroy_process_group()


def ways(every: int) -> dict[str, Attach]:
    """Return what is compared, by name; "bare" communicates nothing."""

    def outer(**given: Any) -> Attach:
        def attach(net: Module, inner: torch.optim.Optimizer) -> tuple[Module, Any]:
            settings = dict(given)
            if "rank" in settings:
                state = ddp.PowerSGDState(None, settings.pop("rank"), start_powerSGD_iter=0)
                settings |= {"hook": ddp.powerSGD_hook, "state": state}
            made = ddp.DiLoCo(net, inner, every=every, **settings)
            return net, made.sync

        return attach

    def nothing() -> None:
        pass

    half = every // 2
    return {
        "bare": lambda net, inner: (net, nothing),
        "DDP": lambda net, inner: (ddp.DistributedDataParallel(net), nothing),
        "DiLoCo": outer(),
        "DiLoCo, bf16": outer(hook=ddp.bf16_compress_hook),
        "DiLoCo, uint8": outer(hook=ddp.quantization_perchannel_hook),
        "DiLoCo, PowerSGD rank 4": outer(rank=4),
        "DiLoCo, overlap H/2": outer(overlap=half, hook=ddp.bf16_compress_hook),
        "DiLoCo, 2 fragments, overlap H/4": outer(
            fragments=2, overlap=half // 2, hook=ddp.bf16_compress_hook
        ),
    }


def time_steps(raw: Any, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Time rounds of H steps, of DDP a tenth; return the record of each way.

    Collective: over all ranks.

    Raises:
        RuntimeError: The ranks' parameters differ at the end; on all ranks.
    """
    name, size = options.model.split(":")
    model = cases.MODELS[name](int(size))
    own = cases.own_batch(model)
    contenders, ends, nets = [], {}, {}
    for way, attach in ways(options.every).items():
        net = cases.build(model)
        inner = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        called, ends[way] = attach(net, inner)
        nets[way] = net

        def step(called: Module = called, inner: torch.optim.Optimizer = inner) -> None:
            inner.zero_grad()
            called(own).square().mean().backward()
            inner.step()

        count = max(options.every // 10, 1) if way == "DDP" else options.every
        contenders.append(timing.Contender(way, (step,) * count, ()))
    sent = {one.name: _sent_bytes(raw, one) for one in contenders}
    series = timing.time_rounds(raw, contenders, options.rounds, 0.0)
    for way, net in nets.items():
        ends[way]()
        if way != "bare":
            _require_equal(raw, way, net)
    bare, of_ddp = series[0].median_us, sent["DDP"]
    return {
        one.name: report.series_record(one)
        | {"over_bare": one.median_us / bare, "sent_bytes_a_step": sent[one.name]}
        | ({"of_ddp_bytes": sent[one.name] / of_ddp} if of_ddp else {})
        for one in series
    }


def compare_losses(raw: Any, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train on text in each way with equally many words; return the losses on other text.

    Collective: over all ranks.
    """
    words = Words(library_text(20_000 if options.quick else 300_000), 500)
    kept = len(words.numbers) // 10
    numbers, held_out = words.numbers[:-kept], words.numbers[-kept:]
    test = batch(held_out, torch.Generator().manual_seed(1), 4000)
    found: dict[str, dict[str, float]] = {}
    for way, attach in ways(options.every).items():
        torch.manual_seed(0)
        net = NextWord(len(words))
        inner = torch.optim.AdamW(net.parameters(), lr=_LEARNING_RATE)
        called, end = attach(net, inner)
        generator = torch.Generator().manual_seed(100 + raw.Get_rank())
        for _ in range(options.steps):
            x, y = batch(numbers, generator, 64)
            inner.zero_grad()
            torch.nn.functional.cross_entropy(called(x), y).backward()
            inner.step()
        end()
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(net(test[0]), test[1]))
        found[way] = {"loss": max(raw.allgather(loss))}
    for row in found.values():
        row["over_ddp"] = row["loss"] / found["DDP"]["loss"]
        row["is_near"] = row["over_ddp"] <= _MARGIN
    return found


def _sent_bytes(raw: Any, contender: timing.Contender) -> float | None:
    """Return the bytes a step that this rank sends over the link, None without a link."""
    counts = []
    for _ in range(2):
        for call in contender.calls:
            call()
        if _link_bytes() is not None:
            # An average that overlaps ends on its group's thread.
            time.sleep(_LONGEST_AVERAGE_S)
        raw.Barrier()
        counts.append(_link_bytes())
    before, after = counts
    if before is None or after is None:
        return None
    return (after - before) / len(contender.calls)


def _link_bytes() -> int | None:
    """Return the bytes that have left by the device of ``slow_link.sh``; None elsewhere."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "link0":
            return int(counts.split()[8])
    return None


def _require_equal(raw: Any, way: str, net: Module) -> None:
    sums = [sum(p.detach().double().sum().item() for p in net.parameters())]
    if len(set(map(str, raw.allgather(sums)))) > 1:
        raise RuntimeError(f"{way}: the ranks ended with different parameters")


def _table(times: dict[str, dict[str, Any]], losses: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, row in times.items():
        sent = row["sent_bytes_a_step"]
        rows.append(
            [
                name,
                f"{row['median_us'] / 1e3:.2f}",
                f"{row['over_bare']:.3f}",
                "" if sent is None else f"{sent:,.0f}",
                f"{losses[name]['loss']:.3f}",
                f"{losses[name]['over_ddp']:.3f}",
            ]
        )
    headers = ["way", "ms a step", "over bare", "bytes sent a step", "loss on text", "over DDP"]
    return tables.text(rows, headers)


if __name__ == "__main__":
    main()
