"""Time a step with outer steps every H against one without communication; compare losses.

mpirun --bind-to none -n 2 python benchmarks/bench_diloco.py
benchmarks/slow_link.sh 1gbit MPIRUN python benchmarks/bench_diloco.py    (MPICH's mpirun)

``torchft.local_sgd.DiLoCo`` takes part where torchft is installed (training/torchft_replica.py).
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness import benchmark_options, report, tables, timing
from harness.job import Job
from mpidist import ddp
from training import cases, torchft_replica
from training.torchft_replica import TorchftReplica

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from outer_steps import NextWord, batch
from text_training import Words, library_text

Module = torch.nn.Module
# From a module and its inner optimizer to the module that is called, and what ends the training.
Attach = Callable[[Module, torch.optim.Optimizer], tuple[Module, Callable[[], object]]]

_MARGIN = 1.02
_LEARNING_RATE = 3e-3
# An outer optimizer and its settings, those of mpidist's default.
_OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Way:
    """A way to train on several ranks."""

    attach: Attach
    # Inner steps before the first that is measured: an average that begins then ends in a round.
    lead: int = 0


class Usage:
    """Seconds, processor time of the rank's process and bytes on the link, by contender.

    An instance is the ``run_burst`` of ``timing.time_rounds``.
    """

    def __init__(self) -> None:
        self.cpu_s: dict[str, list[float]] = defaultdict(list)
        self.sent_bytes: dict[str, list[float]] = defaultdict(list)

    def __call__(self, comm: Any, contender: timing.Contender, passes: int) -> float:
        """Run passes of a contender, and return the seconds."""
        comm.Barrier()
        sent, start, cpu = _link_bytes(), time.perf_counter(), time.process_time()
        for _ in range(passes):
            for call in contender.calls:
                call()
        elapsed, used = time.perf_counter() - start, time.process_time() - cpu
        count = passes * len(contender.calls)
        self.cpu_s[contender.name].append(used / count)
        comm.Barrier()
        if sent is not None:
            self.sent_bytes[contender.name].append(((_link_bytes() or sent) - sent) / count)
        return elapsed


def main() -> None:
    parser = benchmark_options.parser(__doc__, "link", "quick", rounds=3)
    parser.add_argument("--model", default="mlp:64", metavar="NAME:BATCH", help="that is timed")
    parser.add_argument("--every", type=int, default=50, help="H")
    parser.add_argument("--steps", type=int, default=1500, help="of the trainings on text")
    options = parser.parse_args()
    if options.quick:
        options.model, options.every, options.rounds, options.steps = "many:2", 4, 1, 8
    with Job(uses_torch=True) as job:
        raw = job.raw
        if job.is_first and not torchft_replica.IS_INSTALLED:
            print(f"without torchft: {torchft_replica.INSTALL}")
        timing.touch_memory()
        replicas: list[TorchftReplica] = []
        compared = ways(raw, options.every, replicas)
        times = time_steps(raw, options, compared)
        losses = compare_losses(raw, options, compared)
        if job.is_first:
            print(_table(times, losses))
            fields = {
                "link": options.link, "torchft": torchft_replica.installed_version(),
                "model": options.model, "every": options.every, "rounds": options.rounds,
                "steps_on_text": options.steps,
                "times": {name: row for name, row in times.items() if name in losses},
                "floors": {name: row for name, row in times.items() if name not in losses},
                "losses": losses,
            }  # fmt: skip
            job.write(options.output, "diloco", fields, parts=[options.link])
        for one in replicas:
            one.close()


def ways(raw: Any, every: int, replicas: list[TorchftReplica]) -> dict[str, Way]:
    """Return what is compared, by name; "bare" communicates nothing.

    Args:
        replicas: Takes those of torchft's managers that the ways construct.
    """

    def outer(**given: Any) -> Way:
        def attach(net: Module, inner: torch.optim.Optimizer) -> tuple[Module, Any]:
            settings = dict(given)
            if "rank" in settings:
                state = ddp.PowerSGDState(None, settings.pop("rank"), start_powerSGD_iter=0)
                settings |= {"hook": ddp.powerSGD_hook, "state": state}
            made = ddp.DiLoCo(net, inner, every=every, **settings)
            return net, made.sync

        return Way(attach, given.get("overlap", 0))

    def theirs(parts: int = 1, **given: Any) -> Way:
        def attach(net: Module, inner: torch.optim.Optimizer) -> tuple[Module, Any]:
            replicas.append(TorchftReplica(raw))
            fragments = torchft_replica.even_fragments(net, parts)
            outers = [_OUTER(part.parameters()) for part in fragments]
            made = replicas[-1].diloco(fragments, inner, outers, every, **given)
            # The global parameters, from which those of a rank differ with a mixture.
            return net, made._restore_parameters

        return Way(attach)

    half, bf16 = every // 2, ddp.bf16_compress_hook
    found = {
        "bare": Way(lambda net, inner: (net, _nothing)),
        "DDP": Way(lambda net, inner: (ddp.DistributedDataParallel(net), _nothing)),
        "DiLoCo": outer(),
        "DiLoCo, bf16": outer(hook=bf16),
        "DiLoCo, uint8": outer(hook=ddp.quantization_perchannel_hook),
        "DiLoCo, PowerSGD rank 1": outer(rank=1),
        "DiLoCo, PowerSGD rank 4": outer(rank=4),
        "DiLoCo, overlap H/2": outer(overlap=half, hook=bf16),
        "DiLoCo, 2 fragments, overlap H/4": outer(fragments=2, overlap=half // 2, hook=bf16),
        "DiLoCo, uint8, 2 fragments, overlap H/4": outer(
            fragments=2, overlap=half // 2, hook=ddp.quantization_perchannel_hook
        ),
    }
    if torchft_replica.IS_INSTALLED:
        found |= {
            "torchft": theirs(),
            "torchft, 2 fragments, delay H/4": theirs(
                2, fragment_sync_delay=half // 2, fragment_update_alpha=0.5
            ),
        }
    return found


def floors(raw: Any, numel: int, every: int) -> dict[str, Way]:
    """Return steps without outer steps, with an all-reduce of as many bytes every H."""
    ours, theirs = torch.ones(numel), np.ones(numel, np.float32)
    gloo = dist.new_group(backend="gloo")

    def reduced_by(call: Callable[[], object]) -> Way:
        def attach(net: Module, inner: torch.optim.Optimizer) -> tuple[Module, Any]:
            steps = 0

            def after(*_: object) -> None:
                nonlocal steps
                steps += 1
                if steps % every == 0:
                    call()

            inner.register_step_post_hook(after)
            return net, _nothing

        return Way(attach)

    from mpi4py import MPI

    return {
        "Gloo's all_reduce": reduced_by(lambda: dist.all_reduce(ours, group=gloo)),
        "MPI_Allreduce": reduced_by(lambda: raw.Allreduce(MPI.IN_PLACE, theirs)),
    }


def time_steps(
    raw: Any, options: argparse.Namespace, compared: dict[str, Way]
) -> dict[str, dict[str, Any]]:
    """Time rounds of H steps, of DDP a tenth; return the record of each way and each floor.

    Collective: over all ranks.

    Raises:
        RuntimeError: The ranks' parameters differ at the end, or mpidist's and torchft's; on all
            ranks.
    """
    name, size = options.model.split(":")
    model = cases.MODELS[name](int(size))
    own = cases.own_batch(model)
    lone = floors(raw, model.numel(), options.every)
    contenders, ends, nets = [], {}, {}
    for way, how in (compared | lone).items():
        net = cases.build(model)
        inner = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        called, ends[way] = how.attach(net, inner)
        nets[way] = net

        def step(called: Module = called, inner: torch.optim.Optimizer = inner) -> None:
            inner.zero_grad()
            called(own).square().mean().backward()
            inner.step()

        for _ in range(how.lead):
            step()
        count = max(options.every // 10, 1) if way == "DDP" else options.every
        contenders.append(timing.Contender(way, (step,) * count, ()))
    usage = Usage()
    series = timing.time_rounds(raw, contenders, options.rounds, 0.0, usage)
    if "torchft" in nets:
        _require_near(raw, nets["DiLoCo"], nets["torchft"])
    for way, net in nets.items():
        ends[way]()
        if way != "bare" and way not in lone:
            _require_equal(raw, way, net)
    cpu_s = {way: float(np.median(one[-options.rounds :])) for way, one in usage.cpu_s.items()}
    sent = {way: float(np.median(one)) for way, one in usage.sent_bytes.items()}
    of_ddp = sent.get("DDP")
    return {
        one.name: report.series_record(one)
        | {
            "over_bare": timing.compare(one, series[0]).ratio_of_rounds,
            "cpu_over_bare": cpu_s[one.name] / cpu_s["bare"],
            # Of a way that averages gradients: of one step.
            "average_ms": timing.compare(one, series[0]).difference_of_rounds_us
            * (1 if one.name == "DDP" else options.every)
            / 1e3,
            "sent_bytes_a_step": sent.get(one.name),
        }
        | ({"of_ddp_bytes": sent[one.name] / of_ddp} if of_ddp else {})
        for one in series
    }


def compare_losses(
    raw: Any, options: argparse.Namespace, compared: dict[str, Way]
) -> dict[str, dict[str, float]]:
    """Train on text in each way with equally many words; return the losses on other text.

    Collective: over all ranks.
    """
    words = Words(library_text(20_000 if options.quick else 300_000), 500)
    kept = len(words.numbers) // 10
    numbers, held_out = words.numbers[:-kept], words.numbers[-kept:]
    test = batch(held_out, torch.Generator().manual_seed(1), 4000)
    found: dict[str, dict[str, float]] = {}
    for way, how in compared.items():
        torch.manual_seed(0)
        net = NextWord(len(words))
        inner = torch.optim.AdamW(net.parameters(), lr=_LEARNING_RATE)
        called, end = how.attach(net, inner)
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


def _nothing() -> None:
    pass


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


def _require_near(raw: Any, ours: Module, theirs: Module) -> None:
    """Raise unless mpidist and torchft have made the same parameters of the same batches."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    if not all(raw.allgather(all(torch.allclose(a, b, 1e-5, 1e-6) for a, b in pairs))):
        raise RuntimeError("mpidist's parameters are not those of torchft")


def _table(times: dict[str, dict[str, Any]], losses: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, row in times.items():
        sent = row["sent_bytes_a_step"]
        rows.append(
            [
                name,
                f"{row['median_us'] / 1e3:.2f}",
                f"{row['over_bare']:.3f}",
                f"{row['cpu_over_bare']:.3f}",
                f"{row['average_ms']:.0f}",
                "" if sent is None else f"{sent:,.0f}",
                *(
                    (f"{losses[name]['loss']:.3f}", f"{losses[name]['over_ddp']:.3f}")
                    if name in losses
                    else ("", "")
                ),
            ]
        )
    headers = [
        "way", "ms a step", "over bare", "processor time over bare", "ms an average",
        "bytes sent a step", "loss on text", "over DDP",
    ]  # fmt: skip
    return tables.text(rows, headers)


if __name__ == "__main__":
    main()
