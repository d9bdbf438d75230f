"""Job with Lightning's Trainer: trains, validates, saves and resumes from a folder."""

from __future__ import annotations

import os
import sys

import lightning as L
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mpidist.comm.mpi import torchrun_env
from mpidist.ddp import PowerSGDState, fp16_compress_wrapper, powerSGD_hook
from mpidist.frameworks import lightning as ours
from tests.frameworks import evidence

EPOCHS, RANKS = 2, 2


class Module(L.LightningModule):
    """The shared model; ``by_hand``: manual optimization, two backward passes per step."""

    def __init__(self, by_hand=False, shards=False):
        super().__init__()
        self.net, self.shards = evidence.model(), shards
        self.automatic_optimization = not by_hand
        self.wrapped = None

    def configure_model(self):
        # Called by fit and by validate.
        if self.shards and not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return evidence.optimizer(self.parameters())

    def training_step(self, batch, index):
        self.wrapped = type(self.trainer.strategy.model).__module__
        loss = evidence.loss_of(self.net, *batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            with self.trainer.strategy.model.no_sync():
                self.manual_backward(loss / 2)
            self.manual_backward(evidence.loss_of(self.net, *batch) / 2)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        self.log("loss", evidence.loss_of(self.net, *batch), sync_dist=True)


def trainer(strategy, folder, epochs=EPOCHS, devices=RANKS, **options):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    made = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        **quiet,
        **options,
    )
    assert (
        made.world_size == RANKS and made.strategy.cluster_environment.creates_processes_externally
    )
    return made


def loader(rank):
    examples = TensorDataset(*evidence.examples(RANKS))
    return DataLoader(
        examples,
        evidence.LOCAL_BATCH,
        sampler=DistributedSampler(examples, RANKS, rank, shuffle=False),
    )


def fit(strategy, folder, epochs=EPOCHS, ckpt_path=None, **options):
    kinds = {name: options.pop(name) for name in ("by_hand", "shards") if name in options}
    made, module = trainer(strategy, folder, epochs, **options), Module(**kinds)
    made.fit(module, loader(made.global_rank), ckpt_path=ckpt_path)
    return made, module


def course(strategy, folder, expected, **kinds):
    """Train, validate, train half, save and resume in a new Trainer.

    Return the differences from one process.
    """
    made, module = fit(strategy(), folder, **kinds)
    facts = {"wrapped": module.wrapped, "trained": evidence.distance(module.net, expected)}
    loss = made.validate(module, loader(made.global_rank), verbose=False)[0]["loss"]
    facts["loss"] = loss - float(evidence.loss_of(expected, *evidence.examples(RANKS)))
    half, module = fit(strategy(), folder, epochs=1, **kinds)
    half.save_checkpoint(f"{folder}/half.ckpt")
    facts["resumed"] = evidence.distance(
        fit(strategy(), folder, ckpt_path=f"{folder}/half.ckpt", **kinds)[1].net, expected
    )
    return facts


def hooked(rank_of_approximation, wrapper=None):
    state = PowerSGDState(
        None,
        matrix_approximation_rank=rank_of_approximation,
        start_powerSGD_iter=2,
        min_compression_rate=0,
    )
    return ours.DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=powerSGD_hook, ddp_comm_wrapper=wrapper
    )


def main(folder: str) -> None:
    expected = evidence.reference(RANKS, EPOCHS)

    def away(strategy, **options):
        return evidence.distance(fit(strategy, folder, **options)[1].net, expected)

    facts = {
        "named": course(lambda: "ddp", f"{folder}/named", expected),
        "ours": course(ours.DDPStrategy, f"{folder}/ours", expected),
        "sharded": course(
            lambda: ModelParallelStrategy(RANKS, 1), f"{folder}/sharded", expected, shards=True
        ),
    }
    rank = dist.get_rank()
    by_hand = {
        "ours": away(ours.DDPStrategy(), by_hand=True),
        "static": away(ours.DDPStrategy(static_graph=True), by_hand=True),
        "unused": away(ours.DDPStrategy(find_unused_parameters=True), by_hand=True),
        "named": away("ddp", by_hand=True),
    }
    hooks = {
        "full_rank": away(hooked(8)),
        "rank_1": away(hooked(1)),
        "wrapped": away(hooked(8, fp16_compress_wrapper)),
        # Lightning's own strategy registers no hook on the CPU (docs/frameworks.md).
        "theirs": away(
            DDPStrategy(
                ddp_comm_state=torch_hooks.PowerSGDState(None, 1),
                ddp_comm_hook=torch_hooks.powerSGD_hook,
            )
        ),
    }
    accumulated = fit(ours.DDPStrategy(), folder, accumulate_grad_batches=3)[1].net
    facts["accumulated"] = evidence.distance(accumulated, evidence.reference(RANKS, EPOCHS, 3))
    wrong = {
        "backend": evidence.text_of_error(lambda: ours.DDPStrategy(process_group_backend="gloo")),
        "start": evidence.text_of_error(lambda: ours.DDPStrategy(start_method="fork")),
        "devices": evidence.text_of_error(lambda: fit(ours.DDPStrategy(), folder, devices=3)),
    }
    # Under mpirun in a batch job of Slurm all ranks have the batch shell's variables.
    os.environ.update(
        SLURM_NTASKS="2",
        SLURM_JOB_NAME="train",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_NODEID="0",
    )
    in_batch = trainer(ours.DDPStrategy(), folder)
    environment = in_batch.strategy.cluster_environment
    facts["environment"] = [
        in_batch.global_rank,
        in_batch.local_rank,
        environment.node_rank(),
        environment.detect(),
    ]
    # As the user sets it, so that all ranks take the first device.
    os.environ.pop(torchrun_env.SET_BY_US, None)
    os.environ["LOCAL_RANK"] = "0"
    facts["sharing"] = in_batch.strategy.cluster_environment.local_rank()
    evidence.report(rank, by_hand=by_hand, hooks=hooks, wrong=wrong, **facts)


main(sys.argv[1])
