"""One job of the scaling benchmark: collectives by size, training steps, memory.

Letters: W ranks of the job; N bytes of an operation: a rank's output of an all-reduce or a
broadcast, an all-gather's whole output, a reduce-scatter's whole input, as in Thakur, Rabenseifner
and Gropp (2005).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from harness import devices, environment, process_memory, timing
from harness.job import Job
from mpidist import ddp
from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.algorithms.shared_memory import share
from mpidist.comm.world_group import native_group
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import in_order
from training import cases

_MI = 1 << 20
# 8 B to 2 KiB, then 4 KiB to 32 MiB in smaller steps, where protocols and algorithms change.
SIZES = (*(8 << (2 * power) for power in range(5)), *(4096 << power for power in range(14)))
HOOKS = ("none", "bf16", "powersgd-1", "powersgd-4", "powersgd-16")
_PROFILED = 7  # steps
_LENT_BYTES = 256 << 10
# Smaller messages do not reach a link's rate.
_DRAINED_FROM_BYTES = 4 << 10


def run(options: Any) -> dict[str, Any] | None:
    """Measure this job; return its record on rank 0.

    Collective: over all ranks.
    """
    device = devices.chosen(options.device)
    with Job(least=1, uses_torch=True, device=device) as job:
        record = _measured(job, options, device)
    return record if job.is_first else None


def _measured(job: Job, options: Any, device: torch.device) -> dict[str, Any]:
    raw, about, group = job.raw, job.about, native_group(None)
    machines = raw.allgather(environment.machine_identity())
    cores = len(set().union(*(set(own) for own in about["cores_of_ranks"])))
    on_one = max(machines.count(machine) for machine in machines)
    if len(set(group._comm.nodes)) > 1 and not options.link:
        raise SystemExit(
            "the ranks are on several nodes: name the rate of the link between them, --link 100gbit"
        )
    # The first touch of a page is expensive on a virtual machine. Touch little memory, because 8
    # ranks may share a small machine.
    torch.empty(128 * _MI, dtype=torch.uint8).fill_(1)
    record = {
        "benchmark": "scaling",
        "environment": about,
        "link": options.link,
        "bucket_cap_mb": options.bucket_cap_mb,
        "ranks": group.size,
        "nodes": len(set(group._comm.nodes)),
        "ranks_per_node": max(
            list(group._comm.nodes).count(node) for node in set(group._comm.nodes)
        ),
        "machines": len(set(machines)),
        "cores": cores,
        "oversubscribed": on_one > cores and device.type == "cpu",
        "collectives": list(collectives(raw, group, options, device)),
        "steps": [],
    }
    memory = None
    slowest_s = 0.0
    biggest = 0
    for text in options.networks:
        model = network(text)
        # Skip a network that would take too long, judging by the previous ones.
        if biggest and slowest_s * model.numel() / biggest > options.longest_step_s:
            continue
        steps, memory = training(raw, text, options, device, memory)
        record["steps"] += steps
        slowest_s, biggest = max(one["us"]["none"] for one in steps) / 1e6, model.numel()
    record["memory"] = memory
    return record


def collectives(
    raw: Any, group: Any, options: Any, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield one entry per operation and size: the median of the slowest rank.

    An operation ends at the first long call.
    """
    for operation in options.operations:
        for nbytes in (0,) if operation == "barrier" else options.sizes:
            pass_calls = _call(operation, nbytes, group, device)
            if pass_calls is None:
                break
            call, kept = pass_calls
            contender = timing.Contender(operation, call, kept)
            run = drained(group, options.link) if nbytes >= _DRAINED_FROM_BYTES else None
            (series,) = timing.time_rounds(raw, [contender], options.rounds, options.burst_s, run)
            yield {
                "operation": operation,
                "nbytes": nbytes,
                "us": series.median_us,
                "p90_us": series.percentile_us(90),
            }
            if series.median_us > 1e6 * options.longest_call_s:
                break


def _call(operation: str, nbytes: int, group: Any, device: torch.device) -> Any:
    """Return a pass's calls and their memory; None, on all ranks, if unavailable."""
    whole = max(nbytes // 4, 1)
    part = max(whole // group.size, 1)
    if operation == "barrier":
        return (group.barrier,), ()
    # As DDP averages a bucket on one node.
    if operation == "average":
        memory = share(group, 4 * whole) if device.type == "cpu" else None
        if memory is None:
            return None
        tensor = memory.tensor(0, whole, torch.float32)
        tensor.own.zero_()
        return (tensor.average,), (tensor.own,)
    full = torch.zeros(
        part * group.size if operation in ("all_gather", "reduce_scatter") else whole, device=device
    )
    own = torch.zeros(part, device=device)
    calls: dict[str, tuple[Callable[[], Any], ...]] = {
        "all_reduce": (partial(group.all_reduce, full, AVG),),
        "all_gather": (partial(group.all_gather_into_tensor, full, own),),
        "reduce_scatter": (partial(group.reduce_scatter_tensor, own, full),),
        # The root rotates: a fixed root would run ahead.
        "broadcast": tuple(partial(group.broadcast, full, root) for root in range(group.size)),
    }
    return tuple(devices.awaited(call, device) for call in calls[operation]), (full, own)


def drained(group: Any, link: str) -> timing.RunBurst | None:
    """Return a burst that first exhausts the credit of a limited link; None without such a link.

    tc's token bucket passes 256 KiB at once (``slow_link.sh``), which is 20 ms of a link of 100
    Mbit/s: messages of medium size would appear unlimited.
    """
    if not link or group.is_single_node:
        return None
    lent = torch.zeros(_LENT_BYTES // 4)

    def run(comm: Any, contender: timing.Contender, passes: int) -> float:
        group.all_reduce(lent)
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(passes):
            for call in contender.calls:
                call()
        return time.perf_counter() - start

    return run


def network(text: str) -> cases.Model:
    """Return an MLP of ``WIDTHxDEPTH`` (512x4: four layers of 512); its batch is set later."""
    width, depth = map(int, text.split("x"))

    def build() -> nn.Module:
        return nn.Sequential(
            *(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU()))
        )

    return cases.Model(text, build, lambda: torch.randn(1, width))


def training(
    raw: Any, text: str, options: Any, device: torch.device, memory: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Measure one network, weak and strong: steps by hook, and readiness of the buckets."""
    size = raw.Get_size()
    width = int(text.split("x")[0])
    entries = []
    for scaling, batch in (
        ("weak", options.batch),
        ("strong", max(options.total_batch // size, 1)),
    ):
        plain = network(text)
        model = cases.Model(text, plain.build, partial(torch.randn, batch, width)).on(device)
        own = cases.own_batch(model)
        if memory is None:
            memory = memory_of(raw, model, own, options, device)
        hooks = HOOKS if scaling == "weak" else ("none",)
        ready: list[list[tuple[int, float]]] = []
        nets = {
            "noop": cases.ours(model, ready, _record_ready, bucket_cap_mb=options.bucket_cap_mb)
        }
        nets |= {hook: with_hook(model, hook, options.bucket_cap_mb) for hook in hooks}
        contenders = [cases.contender("bare", cases.build(model), own)]
        contenders += [cases.contender(name, net, own) for name, net in nets.items()]
        run = drained(native_group(None), options.link)
        series = timing.time_rounds(raw, contenders, options.step_rounds, options.burst_s, run)
        profile = _profile(contenders[1].calls[0], ready)
        us = {one.name: one.median_us for one in series}
        entries.append(
            {
                "network": text,
                "parameters": model.numel(),
                "shapes": [list(parameter.shape) for parameter in plain.build().parameters()],
                "scaling": scaling,
                "batch": batch,
                "us": us,
                # Communication's addition to the step, including the hook's compression.
                "exposed_us": {hook: us[hook] - us["noop"] for hook in hooks},
                "buckets": profile,
            }
        )
    return entries, memory


def with_hook(model: cases.Model, hook: str, bucket_cap_mb: float) -> nn.Module:
    """Return a model in mpidist's DDP with one of ``HOOKS``."""
    if hook == "none":
        return cases.ours(model, bucket_cap_mb=bucket_cap_mb)
    if hook == "bf16":
        return cases.ours(model, None, ddp.bf16_compress_hook, bucket_cap_mb=bucket_cap_mb)
    state = ddp.PowerSGDState(None, int(hook.split("-")[1]), start_powerSGD_iter=0)
    return cases.ours(model, state, ddp.powerSGD_hook, bucket_cap_mb=bucket_cap_mb)


@in_order
def _record_ready(state: list[list[tuple[int, float]]], bucket: GradBucket) -> Any:
    if bucket.index() == 0:
        state.append([])
    state[-1].append((bucket.buffer().nbytes, time.perf_counter()))
    return ddp.noop_hook(None, bucket)


def _profile(
    step: Callable[[], Any], recorded: list[list[tuple[int, float]]]
) -> list[dict[str, float]]:
    """Return each bucket's bytes and time of readiness, as median share of the bare step."""
    shares = []
    recorded.clear()
    for _ in range(_PROFILED):
        start = time.perf_counter()
        step()
        whole = time.perf_counter() - start
        shares.append([(at - start) / whole for _, at in recorded[-1]])
    middle = np.median(np.array(shares), axis=0)
    return [
        {"nbytes": nbytes, "ready": float(at)}
        for (nbytes, _), at in zip(recorded[-1], middle, strict=True)
    ]


def memory_of(
    raw: Any, model: cases.Model, batch: torch.Tensor, options: Any, device: torch.device
) -> dict[str, Any]:
    """Return the largest memory of a rank, in MiB: before the model, and in DDP after two steps."""
    before = process_memory.resident_and_shared_mib()
    net = with_hook(model, "none", options.bucket_cap_mb)
    # This makes two steps.
    cases.contender("memory", net, batch)
    own = (
        *before,
        *process_memory.resident_and_shared_mib(),
        torch.cuda.max_memory_allocated() / _MI if device.type == "cuda" else 0.0,
    )
    names = ("rss_before_mib", "pss_before_mib", "rss_mib", "pss_mib", "device_mib")
    most = dict(zip(names, map(max, zip(*raw.allgather(own), strict=True)), strict=True))
    return {"network": model.name, "batch": len(batch), **most}
