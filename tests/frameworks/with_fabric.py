"""Job with Lightning Fabric: trains, accumulates, evaluates, saves and resumes from a folder."""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mpidist.ddp import PowerSGDState, powerSGD_hook
from mpidist.frameworks import fabric as ours
from tests.frameworks import evidence

EPOCHS, RANKS = 2, 2


def fresh(strategy):
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    assert fabric.world_size == RANKS
    model = fabric.setup_module(evidence.model())
    optimizer = fabric.setup_optimizers(evidence.optimizer(model.parameters()))
    examples = TensorDataset(*evidence.examples(RANKS))
    shares = DistributedSampler(examples, RANKS, fabric.global_rank, shuffle=False)
    loader = fabric.setup_dataloaders(DataLoader(examples, evidence.LOCAL_BATCH, sampler=shares))
    return fabric, model, optimizer, loader


def train(fabric, model, optimizer, loader, epochs=EPOCHS, accumulate=1):
    for _ in range(epochs):
        for place, batch in enumerate(loader, 1):
            ends = place % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not ends):
                fabric.backward(evidence.loss_of(model, *batch) / accumulate)
            if ends:
                optimizer.step()
                optimizer.zero_grad()
    return model


def course(strategy, folder, expected):
    """Train, evaluate, train half, save and resume; return the differences from one process."""
    fabric, model, *rest = fresh(strategy())
    facts = {"wrapped": type(model._forward_module).__module__}
    facts["trained"] = evidence.distance(train(fabric, model, *rest), expected)
    with torch.no_grad():
        mean = torch.stack([evidence.loss_of(model, *batch) for batch in rest[1]]).mean()
    loss = float(evidence.loss_of(expected, *evidence.examples(RANKS)))
    facts["loss"] = float(fabric.all_reduce(mean, reduce_op="mean")) - loss

    first = fresh(strategy())
    train(*first, epochs=1)
    first[0].save(folder, {"model": first[1], "optimizer": first[2], "epoch": 1})
    fabric, model, optimizer, loader = fresh(strategy())
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    fabric.load(folder, state)
    facts["epoch"] = state["epoch"]
    facts["resumed"] = evidence.distance(
        train(fabric, model, optimizer, loader, epochs=1), expected
    )
    return facts


def sharded():
    def parallelize(module, mesh):
        return fully_shard(module, mesh=mesh["data_parallel"])

    return ModelParallelStrategy(parallelize, data_parallel_size=RANKS, tensor_parallel_size=1)


def hooked(rank_of_approximation):
    state = PowerSGDState(
        None,
        matrix_approximation_rank=rank_of_approximation,
        start_powerSGD_iter=2,
        min_compression_rate=0,
    )
    return ours.DDPStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)


def main(folder: str) -> None:
    expected = evidence.reference(RANKS, EPOCHS)
    facts = {
        "named": course(lambda: "ddp", f"{folder}/named.ckpt", expected),
        "ours": course(ours.DDPStrategy, f"{folder}/ours.ckpt", expected),
        "sharded": course(sharded, f"{folder}/sharded", expected),
    }
    thirds = evidence.reference(RANKS, EPOCHS, 3)
    facts["accumulated"] = [
        evidence.distance(train(*fresh(strategy()), accumulate=3), thirds)
        for strategy in (DDPStrategy, ours.DDPStrategy)
    ]
    facts["hooks"] = [evidence.distance(train(*fresh(hooked(rank))), expected) for rank in (8, 1)]
    facts["wrong"] = evidence.text_of_error(
        Fabric(accelerator="cpu", devices=3, strategy=ours.DDPStrategy()).launch
    )
    made = fresh(ours.DDPStrategy())
    plain = evidence.model()
    facts["unwrapped"] = evidence.text_of_error(
        lambda: made[0].strategy._backward_sync_control.no_backward_sync(plain, True)
    )
    evidence.report(made[0].global_rank, **facts)


main(sys.argv[1])
