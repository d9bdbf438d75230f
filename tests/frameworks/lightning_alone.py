"""Job with Lightning's Trainer and its own strategy, which imports nothing of mpidist.

After its last line a process has 30 s to end; then it prints its stacks and ends with status 1.
"""

import faulthandler
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    """A line."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, default_root_dir=sys.argv[1]
    )
    examples = TensorDataset(torch.randn(32, 4))
    options = {"batch_size": 4, "num_workers": 1, "persistent_workers": True}
    trainer.fit(Module(), DataLoader(examples, **options), DataLoader(examples, **options))
    # One write a line, because both ranks share the pipe.
    sys.stdout.write(f"\nended as {trainer.global_rank} of {trainer.world_size}\n")
    sys.stdout.flush()
    faulthandler.dump_traceback_later(30, exit=True)
