"""Job with transformers' Trainer: trains a tiny GPT-2, evaluates, predicts, saves, resumes."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.frameworks import evidence

STEPS, WORDS, LENGTH, LOCAL_BATCH = 4, 32, 10, 3


class Sentences(Dataset):
    """One global batch, on all of which each step is taken, in any order of the examples."""

    def __init__(self, ranks: int) -> None:
        drawn = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, WORDS, (ranks * LOCAL_BATCH, LENGTH), generator=drawn)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, place):
        return {"input_ids": self.tokens[place], "labels": labels_of(self.tokens[place])}


def labels_of(tokens):
    # The Trainer divides by the number of labels, the model's own loss by the number of
    # predictions, of which the first token has none.
    labels = tokens.clone()
    labels[..., 0] = -100
    return labels


def gpt2():
    torch.manual_seed(1)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, **ends, **dropout
        )
    )


def trainer(folder, ranks, **arguments):
    settings = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=LOCAL_BATCH,
        per_device_eval_batch_size=LOCAL_BATCH,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=STEPS,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    return Trainer(
        model=gpt2(), args=settings, train_dataset=Sentences(ranks), eval_dataset=Sentences(ranks)
    )


def reference(ranks):
    model, tokens = gpt2(), Sentences(ranks).tokens
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels_of(tokens)).loss.backward()
        optimizer.step()
    model.eval()
    return model, model(input_ids=tokens, labels=labels_of(tokens))


def main(folder: str) -> None:
    first = trainer(folder, ranks=2)
    ranks, rank = first.args.world_size, first.args.process_index
    expected, outputs = reference(ranks)
    first.train()
    facts = {
        "wrapped": type(first.model_wrapped).__module__,
        "ranks": ranks,
        "mode": first.args.parallel_mode.value,
    }
    facts["trained"] = evidence.distance(first.model, expected)
    facts["loss"] = first.evaluate()["eval_loss"] - float(outputs.loss)
    facts["logits"] = float(
        (torch.from_numpy(first.predict(Sentences(ranks)).predictions) - outputs.logits).abs().max()
    )

    second = trainer(folder, ranks)
    facts["before"] = evidence.distance(second.model, gpt2())
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    facts["resumed"] = evidence.distance(second.model, expected)

    facts["named"] = evidence.distance(
        _trained(trainer(f"{folder}/named", ranks, ddp_backend="gloo")), expected
    )
    dist.barrier()
    facts["wrong"] = evidence.text_of_error(
        lambda: TrainingArguments(folder, use_cpu=True, ddp_backend="mpidist").device
    )
    evidence.report(rank, **facts)


def _trained(made):
    made.train()
    return made.model


main(sys.argv[1])
