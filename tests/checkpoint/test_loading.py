"""Failed loads: all ranks raise the same error and keep their state."""

import copy
import re
import shutil
import warnings

import pytest
import torch

from mpidist.checkpoint import load, manifest, save
from mpidist.errors import CheckpointError, DisagreementError
from mpidist.optim import OSS
from tests.checkpoint.runs import Run
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import same

pytestmark = pytest.mark.mpi


@pytest.fixture
def saved(group, folder):
    run = Run(group, "powersgd")
    run.train(1)
    save(folder, 1, **run.state(), group=group)
    run.train(1)
    return run, save(folder, 2, **run.state(), group=group)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


DAMAGE = [
    (manifest.MODEL, cut, "it was cut short"),
    (manifest.MODEL, flip, "model.pt is damaged"),
    (manifest.TRAINING, flip, "training.pt is damaged"),
    (manifest.OPTIMIZER, lambda path: path.unlink(), "optimizer.pt missing"),
    (manifest.NAME, cut, "step-2: manifest.json is damaged"),
    (
        manifest.NAME,
        lambda path: path.write_bytes(b"\xff\xfe"),
        "without its folder the one before is taken",
    ),
    ("rank-{last}", flip, "rank-{last}-of-{size}.pt is damaged"),
    ("powersgd-{last}", lambda path: path.unlink(), "powersgd-{last}-of-{size}.pt missing"),
]


def test_damage_is_named_on_all_ranks(group, folder, saved):
    run, path = saved
    before = [tensor.clone() for tensor in run.tensors()]
    for name, damage, words in DAMAGE:
        name, words = (text.format(last=group.size - 1, size=group.size) for text in (name, words))
        target = path / (name if "." in name else f"{name}-of-{group.size}.pt")
        if group.rank == 0:
            kept = target.read_bytes()
            damage(target)
        group.barrier()
        text = raises_on_all(
            group, CheckpointError, lambda: load(folder, **run.state(), group=group), words
        )
        agree(group, len(set(group.all_gather_object(text))) == 1, "other words")
        if group.rank == 0:
            target.write_bytes(kept)
        group.barrier()
    agree(group, same(run.tensors(), before))
    agree(group, load(folder, **run.state(), group=group).step == 2)


def test_a_truncated_checkpoint_is_skipped_with_a_warning(group, folder, saved):
    run, path = saved

    def outcome():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = load(folder, **run.state(), group=group)
        words = [str(warning.message) for warning in caught if "cut short" in str(warning.message)]
        return None if found is None else found.step, bool(words) == (group.rank == 0)

    if group.rank == 0:
        (path / manifest.NAME).unlink()
    group.barrier()
    agree(group, outcome() == (1, True), "the one before was not used, or there was no warning")
    if group.rank == 0:
        shutil.rmtree(folder / "step-1")
    group.barrier()
    agree(group, outcome() == (None, True))
    agree(group, load(folder / "none", **run.state(), group=group) is None)


def test_another_model_or_run_is_refused(group, folder, saved):
    run, _ = saved
    state = run.state()
    wide = Run(group, "powersgd", width=13)
    deep = torch.nn.Sequential(run.model.module, torch.nn.Linear(3, 3))
    for change, words in (
        (
            {"model": wide.model},
            r"another model: of another shape: 0.weight \(12, 6\) for \(13, 6\)",
        ),
        (
            {"model": deep, "hook_state": None},
            r"another model: missing: 0\.0\.weight.*unexpected: 0\.weight",
        ),
        (
            {"optimizer": torch.optim.SGD(run.model.parameters(), lr=1)},
            "holds the state of Adam, and the optimizer is SGD",
        ),
        (
            {"optimizer": torch.optim.Adam([next(run.model.parameters())])},
            "groups hold .* parameters, this optimizer's",
        ),
        ({"sampler": Run(group, "adam", samples=21).sampler}, "another data set"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "holds no state for scaler"),
        ({"hook_state": run.scheduler}, "holds PowerSGD's state"),
    ):
        before = [tensor.clone() for tensor in run.tensors()]
        caught = ""
        try:
            load(folder, **{**state, **change}, group=group)
        except CheckpointError as error:
            caught = str(error)
        agree(
            group,
            bool(re.search(words, caught)) and same(run.tensors(), before),
            f"{words}: {caught}",
        )
    if group.size > 1:
        raises_on_all(
            group,
            DisagreementError,
            lambda: load(folder / str(group.rank), **state, group=group),
            "checkpoint.load: ranks differ",
        )


def test_shards_of_other_groups_are_refused_before_the_model_changes(group, folder):
    run = Run(group, "oss-greedy")
    run.train(1)
    save(folder, 1, model=run.model, optimizer=run.optimizer, group=group)
    run.train(1)
    before = [tensor.clone() for tensor in run.tensors()]
    # Equal numbers of elements in the same order: only the layout is equal.
    divided = [{"params": [parameter]} for parameter in run.model.parameters()]
    optimizer = OSS(divided, torch.optim.Adam, group, lr=0.05, partition="greedy")
    words = (
        "another model: its optimizer's groups hold [4] parameters, this optimizer's [1, 1, 1, 1]"
    )
    raises_on_all(
        group,
        CheckpointError,
        lambda: load(folder, model=run.model, optimizer=optimizer, group=group),
        words,
    )
    agree(group, same(run.tensors(), before), "the model has changed")


class Own(torch.optim.Adam):
    """Class that is not torch's, and may keep state of any form."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, Own])
def test_state_of_other_shapes_is_refused_of_torchs_classes(group, folder, kind):
    def made(rows):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 3)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        state["exp_avg"] = state["exp_avg"][:rows]
        return {"model": model, "optimizer": optimizer}

    save(folder, 1, **made(2), group=group)
    run = made(3)
    before = copy.deepcopy(run["optimizer"].state_dict())
    try:
        load(folder, **run, group=group)
        caught = ""
    except CheckpointError as error:
        caught = str(error)
    if kind is Own:
        agree(
            group, not caught and len(run["optimizer"].state[run["model"].weight]["exp_avg"]) == 2
        )
    else:
        words = "exp_avg of parameter 0 has shape (2, 2), the parameter (3, 2)"
        agree(group, words in caught and same(run["optimizer"].state_dict(), before), caught)
