"""Job with Accelerate: trains, accumulates, evaluates, saves and resumes from a folder."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from mpidist.ddp import DistributedDataParallel, PowerSGDState, powerSGD_hook
from tests.frameworks import evidence
from tests.frameworks.evidence import LOCAL_BATCH, loss_of

EPOCHS = 2


def fresh(handlers=(), accumulate=1):
    Accelerator._shared_state = {}
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, kwargs_handlers=list(handlers)
    )
    model = evidence.model()
    loader = DataLoader(
        TensorDataset(*evidence.examples(accelerator.num_processes)), batch_size=LOCAL_BATCH
    )
    return accelerator, *accelerator.prepare(model, evidence.optimizer(model.parameters()), loader)


def train(accelerator, model, optimizer, loader, epochs=EPOCHS):
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, inputs, targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1e6)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def evaluate(accelerator, model, loader):
    """Return the mean loss over all examples, of which each rank computes its own."""
    model.eval()
    with torch.no_grad():
        losses = [
            accelerator.gather_for_metrics(loss_of(model, *batch).reshape(1)) for batch in loader
        ]
    model.train()
    return float(torch.cat(losses).mean())


def power_sgd(rank_of_approximation):
    options = {
        "matrix_approximation_rank": rank_of_approximation,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 0,
    }
    return DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option=options
    )


def sharded(ranks):
    """Train with FSDP2; the script shards, because Accelerate shards on GPUs alone."""
    Accelerator._shared_state = {}
    accelerator = Accelerator(cpu=True)
    model = evidence.model()
    fully_shard(model)
    loader = DataLoader(TensorDataset(*evidence.examples(ranks)), batch_size=LOCAL_BATCH)
    optimizer, loader = accelerator.prepare(evidence.optimizer(model.parameters()), loader)
    return train(accelerator, model, optimizer, loader)


def main(folder: str) -> None:
    accelerator, model, optimizer, loader = fresh()
    ranks, rank = accelerator.num_processes, accelerator.process_index
    expected = evidence.reference(ranks, EPOCHS)
    facts = {
        "wrapped": type(model).__module__,
        "device": str(accelerator.device),
        "backend": accelerator.state.backend,
    }

    trained = train(accelerator, model, optimizer, loader)
    facts["trained"] = evidence.distance(trained, expected)
    facts["loss"] = evaluate(accelerator, model, loader) - float(
        loss_of(expected, *evidence.examples(ranks))
    )

    # The first epoch ends with a checkpoint, from which a new script trains the second.
    train(*(first := fresh()), epochs=1)
    first[0].save_state(folder)
    resumed = fresh()
    facts["before"] = evidence.distance(resumed[0].unwrap_model(resumed[1]), evidence.model())
    resumed[0].load_state(folder)
    facts["resumed"] = evidence.distance(train(*resumed, epochs=1), expected)

    facts["accumulated"] = evidence.distance(
        train(*fresh(accumulate=3)), evidence.reference(ranks, EPOCHS, 3)
    )
    facts["unused"] = evidence.distance(
        train(*fresh([DistributedDataParallelKwargs(find_unused_parameters=True)])), expected
    )
    facts["full_rank"] = evidence.distance(train(*fresh([power_sgd(8)])), expected)
    facts["rank_1"] = evidence.distance(train(*fresh([power_sgd(1)])), expected)
    if isinstance(model, DistributedDataParallel):
        hooked = fresh()
        state = PowerSGDState(
            None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0
        )
        hooked[1].register_comm_hook(state, powerSGD_hook)
        facts["our_hook"] = evidence.distance(train(*hooked), expected)
    facts["sharded"] = evidence.distance(sharded(ranks), expected)

    # Accelerate arms torch's reducer between no_sync and the next forward pass.
    accelerator, model, optimizer, loader = fresh()
    batch = next(iter(loader))
    with accelerator.no_sync(model):
        loss = loss_of(model, *batch)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    gradient = next(model.parameters()).grad
    facts["triggered"] = float(
        (accelerator.reduce(gradient.clone(), "mean") - gradient).abs().max()
    )

    Accelerator._shared_state = {}
    accelerator.state._reset_state(reset_partial_state=True)
    facts["wrong"] = evidence.text_of_error(
        lambda: Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="mpidist")])
    )
    evidence.report(rank, **facts)


main(sys.argv[1])
