"""Forged checkpoints with matching digests: an error on all ranks before anything is loaded."""

import json
import os

import pytest
import torch

from mpidist.checkpoint import digested_file, load, manifest, save
from mpidist.ddp.hooks import checkpoint as powersgd
from mpidist.errors import CheckpointError
from tests.checkpoint.runs import Run
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import same

pytestmark = pytest.mark.mpi


class Runs:
    """Object whose unpickling makes a file."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/mpidist-a-checkpoint-has-run",)


def signed(path, name, change):
    """Change a file's content, and its size and digest in the manifest."""
    held = torch.load(path / name, weights_only=True)
    changed = change(held)
    torch.save(held if changed is None else changed, path / name)
    listed(path, name)


def listed(path, name):
    rewritten = json.loads((path / manifest.NAME).read_text())
    rewritten["files"][name] = {
        "bytes": (path / name).stat().st_size,
        "sha256": digested_file.digest(path / name),
    }
    (path / manifest.NAME).write_text(json.dumps(rewritten))


def linked(path, name):
    (path / name).rename(path.parent / "elsewhere")
    (path / name).symlink_to(path.parent / "elsewhere")


def rewritten(path, change):
    held = json.loads((path / manifest.NAME).read_text())
    change(held)
    (path / manifest.NAME).write_text(json.dumps(held))


def first_state(held):
    return next(iter(held["state"].values()))


# For each case: the file, its change, and a part of the error on all ranks.
OF_ALL = {
    "a list": (manifest.TRAINING, lambda held: [held], "holds a list in the place of its dict"),
    "a name is missing": (
        manifest.TRAINING,
        lambda held: held.pop("sampler") and None,
        "holds no sampler",
    ),
    "code": (
        manifest.TRAINING,
        lambda held: held.update(extra=Runs()),
        "holds more than plain data",
    ),
    "the sampler's state is none": (
        manifest.TRAINING,
        lambda held: held.update(sampler=[1]),
        "none of ResumableSampler",
    ),
    "a number for a tensor": (
        manifest.MODEL,
        lambda held: held.update({"0.weight": 3}),
        "of another",
    ),
    "a sparse tensor": (
        manifest.MODEL,
        lambda held: held.update({"0.bias": held["0.bias"].to_sparse()}),
        "of another kind there",
    ),
    "a position beyond the table": (
        "rank",
        lambda held: held["rng"]["numpy"]["state"].update(pos=10**6),
        "beyond its table",
    ),
    "no generators": (
        "rank",
        lambda held: held.update(rng=3),
        "state of the generators is damaged",
    ),
    "no rank's": ("rank", lambda held: {"x": 1}, "holds no optimizer, hook, buffers, rng"),
}
OF_ADAM = {
    "another shape": (
        manifest.OPTIMIZER,
        lambda held: first_state(held).update(exp_avg=torch.zeros(9999)),
        "has shape",
    ),
    "no groups": (
        manifest.OPTIMIZER,
        lambda held: held.pop("param_groups") and None,
        "param_groups",
    ),
    "state of nobody": (
        manifest.OPTIMIZER,
        lambda held: held["state"].update({77: {"step": torch.ones(())}}),
        "none of its parameter",
    ),
    "no state": (
        manifest.OPTIMIZER,
        lambda held: held.update(state=[1, 2]),
        "has a dict in 'state'",
    ),
}
OF_SHARDS = {
    "no layout": ("rank", lambda held: held["optimizer"].pop("layout") and None, ""),
    "no entries": ("rank", lambda held: held["optimizer"].update(entries=3), ""),
    "an entry beyond": (
        "rank",
        lambda held: held["optimizer"].update(
            entries={n: [("exp_avg", "flat", 99)] for n in range(9)}
        ),
        "",
    ),
    "a flat tensor is short": (
        "rank",
        lambda held: held["optimizer"]["flats"].__setitem__(0, torch.zeros(1)),
        "",
    ),
    "masters that are none": (
        "rank",
        lambda held: held["optimizer"].update(masters=[torch.zeros(3)]),
        "master copies",
    ),
    "parked state of nobody": ("rank", lambda held: held["optimizer"].update(parked=[1]), ""),
}
OF_POWERSGD = {
    "no state": ("powersgd", lambda held: held.update(state=3), "no PowerSGD state"),
    "another attribute": (
        "powersgd",
        lambda held: held["state"].update(process_group=3),
        "no PowerSGD state",
    ),
    "an error that is no tensor": (
        "powersgd",
        lambda held: held["state"].update(error_dict={"0.weight": 3}),
        "by parameter name",
    ),
    "an error of another shape": (
        "powersgd",
        lambda held: held["state"].update(error_dict={"0.weight": torch.ones(2)}),
        "of shape",
    ),
    "no plan": ("powersgd", lambda held: held.update(bucket_plan=[1]), "not of format"),
    "a plan of nothing": ("powersgd", lambda held: held.update(bucket_plan={}), "damaged"),
    "a plan of numbers": (
        "powersgd",
        lambda held: held.update(bucket_plan={"buckets": [3], "is_rebuilt": True}),
        "bucket",
    ),
}


@pytest.mark.parametrize("kind", ["adam", "oss-flat", "powersgd"])
def test_what_is_forged_is_refused_on_all_ranks_before_anything_is_taken(group, folder, kind):
    run = Run(group, kind)
    run.train(2)
    path = save(folder, 2, **run.state(), group=group)
    run.train(1)
    before = [tensor.clone() for tensor in run.tensors()]
    own = {"adam": OF_ADAM, "oss-flat": OF_SHARDS, "powersgd": OF_POWERSGD}[kind]
    last, size = group.size - 1, group.size
    for what, (name, change, words) in {**OF_ALL, **own}.items():
        name = {
            "rank": manifest.rank_file(last, size),
            "powersgd": manifest.powersgd_file(last, size),
        }.get(name, name)
        if group.rank == 0:
            kept = {held: (path / held).read_bytes() for held in (name, manifest.NAME)}
            signed(path, name, change)
        group.barrier()
        text = raises_on_all(
            group, CheckpointError, lambda: load(folder, **run.state(), group=group), words
        )
        agree(group, bool(text), what)
        # Optimizers' shards and PowerSGD's state are checked when they are loaded, last of all.
        agree(group, (what in own and kind != "adam") or same(run.tensors(), before), what)
        if group.rank == 0:
            for held, data in kept.items():
                (path / held).write_bytes(data)
        group.barrier()
    agree(group, not os.path.exists("/tmp/mpidist-a-checkpoint-has-run"))
    agree(group, load(folder, **run.state(), group=group).step == 2)


def test_manifests_and_links_that_lead_elsewhere_are_refused(group, folder):
    run = Run(group, "adam")
    path = save(folder, 1, **run.state(), group=group)
    text = (path / manifest.NAME).read_text()
    group.barrier()
    row = {"bytes": 1, "sha256": "0" * 64}
    changes = [
        (
            lambda: rewritten(path, lambda held: held["files"].update({"../../etc/passwd": row})),
            "no file of a checkpoint",
        ),
        (lambda: rewritten(path, lambda held: held.update(world_size=10**12)), "too few"),
        (lambda: (path / manifest.NAME).write_text("[" * 10**6), "is damaged"),
        (lambda: linked(path, manifest.MODEL), "model.pt is missing"),
        (lambda: linked(path, manifest.NAME), "ymbolic link"),
    ]
    for change, words in changes:
        if group.rank == 0:
            kept = {held.name: held.read_bytes() for held in path.iterdir()}
            change()
        group.barrier()
        raises_on_all(
            group, CheckpointError, lambda: load(folder, **run.state(), group=group), words
        )
        group.barrier()
        if group.rank == 0:
            for name, data in kept.items():
                (path / name).unlink()
                (path / name).write_bytes(data)
        group.barrier()
    agree(
        group,
        (path / manifest.NAME).read_text() == text
        and load(folder, **run.state(), group=group).step == 1,
    )


def test_a_powersgd_folder_is_read_as_data(group, folder):
    run = Run(group, "powersgd")
    run.train(1)
    path = powersgd.save(folder, run.model, run.hook_state)
    held = torch.load(path, weights_only=True)
    agree(group, held["format"] == "mpidist.powersgd 1" and type(held["state"]) is dict)
    group.barrier()
    if group.rank == group.size - 1:
        torch.save({**held, "state": Runs()}, path)
    group.barrier()
    raises_on_all(
        group,
        Exception,
        lambda: powersgd.load(folder, run.model),
        "is no PowerSGD state, or damaged",
    )
    agree(group, not os.path.exists("/tmp/mpidist-a-checkpoint-has-run"))
