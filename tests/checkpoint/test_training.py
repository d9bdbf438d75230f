"""Resumed runs: equal bits on as many ranks, equal state and order on others; failed saves."""

import contextlib
import json
import warnings
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from mpidist import progress_bar
from mpidist.checkpoint import commit, digested_file, files, latest, load, manifest, save
from mpidist.errors import CheckpointError, DisagreementError
from mpidist.optim import OSS
from tests.checkpoint.runs import Run
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import same

pytestmark = pytest.mark.mpi


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize(
    "kind", ["adam", "own", "oss-greedy", "oss-flat", "powersgd", "torch", "fsdp"]
)
def test_a_run_goes_on_with_the_same_bits(group, folder, kind):
    straight = Run(group, kind)
    straight.train(4)
    path = save(folder, straight.step, **straight.state(), extra={"best": [0.5]}, group=group)
    expected = straight.train(8)  # into the next epoch
    resumed = Run(group, kind, seed=7)
    resumption = load(folder, **resumed.state(), group=group)
    agree(
        group,
        (resumption.step, resumption.extra, resumption.saved_by, resumption.path)
        == (4, {"best": [0.5]}, group.size, path),
    )
    agree(group, resumed.train(8) == expected, "other losses")
    agree(group, same(resumed.tensors(), straight.tensors()), "other weights or buffers")
    agree(group, same(resumed.moments(), straight.moments()), "other moments")
    agree(group, not list(folder.glob("*.part")))


def test_long_saves_and_loads_have_a_spinner(group, folder, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def spinner(text, rank):
        seen.append((text, rank))
        yield

    monkeypatch.setattr(progress_bar, "spinner", spinner)
    run = Run(group, "adam")
    save(folder, 3, **run.state(), group=group)
    load(folder, **run.state(), group=group)
    rank = group.rank
    agree(group, seen == [("saves step 3", rank), ("loads step-3", rank)], str(seen))


class Delegating:
    """User's wrapper of an optimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


def test_a_wrapper_that_delegates_to_a_sharded_optimizer_is_saved_in_shards(group, folder):
    run = Run(group, "oss-greedy")
    run.train(1)
    run.optimizer.consolidate_state_dict(0)
    run.train(3)  # the consolidated state is now out of date
    moments = run.moments()
    state = run.state()
    save(folder, 3, **{**state, "optimizer": Delegating(state["optimizer"])}, group=group)
    other = Run(group, "oss-greedy", seed=7)
    load(folder, **other.state(), group=group)
    agree(group, same(other.moments(), moments), "other moments")


@pytest.mark.parametrize("kind", ["adam", "oss-greedy", "oss-flat", "powersgd"])
def test_another_number_of_ranks_goes_on(group, folder, kind):
    run = Run(group, kind)
    run.train(2)
    moments = run.moments()
    # The buffers are saved.
    saved = group.broadcast_object([tensor.clone() for tensor in run.tensors()], 0)
    order = torch.randperm(run.sampler.length, generator=torch.Generator().manual_seed(3)).tolist()
    save(folder, run.step, **run.state(), group=group)
    fewer = (
        group.new_group(range(max(group.size - 1, 1)), "fewer")
        if group.rank < max(group.size - 1, 1)
        else None
    )
    wrong = ""
    if fewer is not None:
        other = Run(fewer, kind, seed=5)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            resumption = load(folder, **other.state(), group=fewer)
        is_warned = any("reseeded" in str(warning.message) for warning in warned)
        wrong += "warning " * (is_warned != (fewer.rank == 0 and fewer.size < group.size))
        wrong += "weights " * (not same(other.tensors(), saved)) + "moments " * (
            not same(other.moments(), moments)
        )
        rows = list(zip(*fewer.all_gather_object(list(other.sampler)), strict=True))
        dealt = [sample for row in rows for sample in row]
        wrong += "order " * (dealt[: len(order) - 4 * group.size] != order[4 * group.size :])
        wrong += "numbers" * ((resumption.saved_by, other.scheduler.last_epoch) != (group.size, 2))
        other.step = resumption.step
        other.train(2)
        save(folder, other.step, **other.state(), group=fewer)
        moments = other.moments()
        fewer.close()
    agree(group, not wrong, wrong)
    back = Run(group, kind, seed=6)  # and on more ranks than wrote it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumption = load(folder, **back.state(), group=group)
    found = back.moments()
    agree(group, resumption.step == 4 and (fewer is None or same(found, moments)), "another state")
    back.train(2)


def test_a_sharded_optimizer_and_a_whole_one_take_each_others_state(group, folder):
    kinds = ["oss-flat", "oss-greedy", "adam", "oss-flat"]
    before = Run(group, kinds[0])
    before.train(3)
    for step, kind in enumerate(kinds[1:]):
        save(folder, step, **before.state(), group=group)
        after = Run(group, kind, seed=4)
        load(folder, **after.state(), group=group)
        agree(group, same(after.moments()["state"], before.moments()["state"]), kind)
        before = after
    before.train(1)
    model = Run(group, "adam", seed=8).model.module  # for inference, without data parallelism
    load(folder, model=model, group=group)
    saved = torch.load(latest(folder) / manifest.MODEL, weights_only=True)
    agree(
        group,
        same(list(model.state_dict().values()), list(saved.values()))
        and not any("module" in name for name in saved),
    )


def test_a_wires_master_copies(group, folder):
    def start(partition, wire="bf16"):
        run = Run(group, "adam")
        run.optimizer = OSS(
            run.model.parameters(),
            torch.optim.Adam,
            group,
            partition=partition,
            wire=wire,
            lr=0.05,
        )
        run.scheduler = None
        return run

    run, again, other = start("flat"), start("flat"), start("greedy")
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    run.train(3)
    run.scheduler = None
    save(folder, 3, **run.state(), group=group)
    load(folder, **again.state(), group=group)
    masters = [one.optimizer.rank_local_state_dict()["masters"] for one in (run, again)]
    agree(group, same(*masters))
    plain = start("flat", wire=None)
    for one, is_lost in ((other, False), (plain, group.size > 1)):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            load(folder, **one.state(), group=group)
        is_warned = any("master copies" in str(warning.message) for warning in warned)
        agree(group, is_warned == (group.rank == 0 and is_lost), f"warned: {is_warned}")
    # The next step takes the masters that were loaded, if the parameters are those of the save.
    other.optimizer.refresh_trainable()
    states = [one.optimizer.state_dict(all_ranks=True) for one in (run, other)]
    agree(group, same(*(state.get("masters", {}) for state in states)), "another partition")


class Full:
    """Hook state whose ``state_dict`` fails on one rank."""

    def __init__(self, fails, value=0):
        self.fails, self.value = fails, value

    def state_dict(self):
        if self.fails:
            raise RuntimeError("no state today")
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_former(
    group, folder, monkeypatch
):
    run = Run(group, "powersgd")
    run.train(1)
    former = save(folder, 1, **run.state(), group=group)
    last = group.size - 1

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    stages = [
        (files, "begin", 0),
        (digested_file, "write", last),
        (files, "commit", 0),
        (torch, "save", last),
    ]
    for owner, name, rank in stages:
        with monkeypatch.context() as patch:
            if group.rank == rank:
                patch.setattr(owner, name, fail)
            text = raises_on_all(
                group,
                CheckpointError,
                lambda: save(folder, 2, **run.state(), group=group),
                "No space left",
            )
        agree(
            group,
            "step 2" in text and latest(folder) == former and not list(folder.glob("*.part")),
            name,
        )
    blocked = folder / "file"
    blocked.touch()
    raises_on_all(
        group,
        CheckpointError,
        lambda: save(blocked / "run", 2, **run.state(), group=group),
        "NotADirectoryError",
    )
    raises_on_all(
        group,
        CheckpointError,
        lambda: save(folder, 0, **run.state(), group=group),
        "of a later step than 0",
    )
    save(folder, 2, **run.state(), group=group, keep=1)
    agree(group, sorted(path.name for path in folder.glob("step-*")) == ["step-2"])


def test_what_is_refused_before_anything_is_written(group, folder):
    run = Run(group, "adam")
    state = {**run.state(), "group": group}
    for change, error, words in (
        ({"extra": {"path": folder}}, TypeError, r"extra\['path'\]"),
        ({"step": -1}, ValueError, "at least 0"),
        ({"step": 1.5}, TypeError, "must be an int"),
        ({"keep": 0}, ValueError, "at least 1"),
        ({"model": 3}, TypeError, "torch.nn.Module"),
        ({"hook_state": group}, TypeError, "hook_state must have state_dict"),
        (
            {"model": run.model.module, "hook_state": Run(group, "powersgd").hook_state},
            ValueError,
            "that it serves",
        ),
    ):
        arguments = {"step": 1, **state, **change}
        with pytest.raises(error, match=words):
            save(folder, **arguments)
    if group.size > 1:
        raises_on_all(group, DisagreementError, lambda: save(folder, group.rank, **state), "step")
        wrong = Full(group.rank == 1)
        expected = RuntimeError if group.rank == 1 else DisagreementError
        raises_on_all(
            group,
            expected,
            lambda: save(folder, 1, **{**state, "hook_state": wrong}),
            "no state today",
        )
    agree(group, not list(folder.iterdir()))


@pytest.mark.usefixtures("default_group")
def test_a_module_whose_state_dict_communicates_is_refused(group, folder):
    """That of torch's first FSDP, inside a bare module, too: rank 0 alone would call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    for model in (module, torch.nn.Sequential(module)):
        for call in (partial(save, step=1), partial(commit, step=1), load):
            refused = partial(call, folder, model=model, group=group)
            raises_on_all(group, TypeError, refused, "fully_shard")


def test_a_users_own_hook_state_and_scaler(group, folder):
    run = Run(group, "adam")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    hook = Full(False, value=10 + group.rank)
    state = {**run.state(), "hook_state": hook, "scaler": scaler, "group": group}
    path = save(folder, 1, **state)
    hook.value, scaler = 0, torch.amp.GradScaler("cpu", init_scale=2.0)
    load(folder, **{**state, "scaler": scaler})
    agree(group, hook.value == 10 + group.rank and scaler.get_scale() == 8.0)
    listing = json.loads((path / manifest.NAME).read_text())
    agree(
        group,
        listing["contents"]["hook"] == "state"
        and set(listing["files"]) | {manifest.NAME} == {p.name for p in path.iterdir()},
    )
