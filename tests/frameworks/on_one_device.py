"""Job with Accelerate, transformers' Trainer and Lightning, whose ranks share the first device.

Each trains with ``LOCAL_RANK=0`` and one device; the weights are compared with those of one process
on the batches of all ranks.
"""

from __future__ import annotations

import sys

import lightning as L
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Trainer, TrainingArguments

from mpidist.frameworks.lightning import DDPStrategy
from tests.frameworks import evidence

EPOCHS = 2


def by_accelerate(kind: str) -> dict[str, object]:
    accelerator = Accelerator(cpu=kind == "cpu")
    ranks = accelerator.num_processes
    model = evidence.model()
    loader = DataLoader(TensorDataset(*evidence.examples(ranks)), batch_size=evidence.LOCAL_BATCH)
    model, steps, loader = accelerator.prepare(
        model, evidence.optimizer(model.parameters()), loader
    )
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            accelerator.backward(evidence.loss_of(model, inputs, targets))
            steps.step()
            steps.zero_grad()
    far = evidence.distance(
        accelerator.unwrap_model(model).cpu(), evidence.reference(ranks, EPOCHS)
    )
    return {"far": far, "device": str(accelerator.device), "rank": accelerator.process_index}


class Examples(Dataset):
    """One global batch, on all of which each step is taken."""

    def __init__(self, ranks: int) -> None:
        inputs, targets = evidence.examples(ranks)
        count = ranks * evidence.LOCAL_BATCH
        self.inputs, self.targets = inputs[:count], targets[:count]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


class WithLoss(torch.nn.Module):
    """The shared model with the loss in its output, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = evidence.model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(inputs), labels)}


def by_trainer(kind: str, folder: str) -> dict[str, object]:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=kind == "cpu",
        per_device_train_batch_size=evidence.LOCAL_BATCH,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    ranks = arguments.world_size
    expected, examples = WithLoss(), Examples(ranks)
    steps = torch.optim.SGD(expected.parameters(), lr=0.5)
    for _ in range(arguments.max_steps):
        steps.zero_grad()
        expected(examples.inputs, examples.targets)["loss"].backward()
        steps.step()
    trainer = Trainer(model=WithLoss(), args=arguments, train_dataset=examples)
    trainer.train()
    far = evidence.distance(trainer.model.cpu(), expected)
    return {"far": far, "device": str(arguments.device), "rank": arguments.process_index}


class Module(L.LightningModule):
    """The shared model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = evidence.model()

    def configure_optimizers(self):
        return evidence.optimizer(self.parameters())

    def training_step(self, batch, index):
        self.seen = self.device
        return evidence.loss_of(self.net, *batch)


def by_lightning(kind: str, ranks: int, folder: str) -> dict[str, object]:
    trainer = L.Trainer(
        accelerator="cpu" if kind == "cpu" else "gpu",
        devices=1,
        num_nodes=ranks,
        strategy=DDPStrategy(),
        max_epochs=EPOCHS,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    examples = TensorDataset(*evidence.examples(ranks))
    sampler = torch.utils.data.DistributedSampler(
        examples, ranks, trainer.global_rank, shuffle=False
    )
    module = Module()
    trainer.fit(module, DataLoader(examples, evidence.LOCAL_BATCH, sampler=sampler))
    far = evidence.distance(module.net.cpu(), evidence.reference(ranks, EPOCHS))
    return {"far": far, "device": str(module.seen), "rank": trainer.global_rank}


def main(kind: str, folder: str) -> None:
    accelerate = by_accelerate(kind)
    found = {
        "accelerate": accelerate,
        "trainer": by_trainer(kind, folder),
        "lightning": by_lightning(kind, 2, folder),
    }
    evidence.report(accelerate["rank"], **found)


main(*sys.argv[1:])
