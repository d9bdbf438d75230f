"""Random data-parallel models, mpidist's and torch's, against training in one process."""

import pytest
import torch

from tests.fuzz import models, nets, run_models, run_programs
from tests.fuzz.deadline import Deadline

# Models by number of ranks; other sizes run the first 8.
COUNT = {2: 30}
LIMIT_S = 60


def test_a_seed_gives_one_model():
    assert models.model(7, 3) == models.model(7, 3)
    assert models.model(7, 3) != models.model(8, 3)


def test_every_kind_of_block_and_every_hook_comes_up():
    drawn = [models.model(seed, 3) for seed in range(1500)]
    kinds = {block.kind for model in drawn for block in model.blocks}
    assert kinds >= {
        "linear",
        "shared",
        "frozen",
        "unused",
        "sometimes",
        "scalar",
        "transposed",
        "one",
        "empty",
        "conv",
        "norm",
    }
    assert kinds >= {"complex", "single", "embedding", "sparse", "counter"}
    assert {step.hook for model in drawn for step in model.passes} == {"", *models.HOOKS}
    assert {model.is_torch for model in drawn if model.epochs} == {True, False}
    assert any(model.lone_forward for model in drawn) and any(model.in_backward for model in drawn)
    assert any(step.poisoned is not None for model in drawn for step in model.passes)


def test_a_model_without_a_feature_has_none_of_it():
    drawn = [models.model(seed, 3, ("join", "hooks", "unused", "torch")) for seed in range(300)]
    assert not any(model.epochs or model.is_torch for model in drawn)
    assert not any(step.hook for model in drawn for step in model.passes)
    assert not any(
        block.kind in ("unused", "sometimes") for model in drawn for block in model.blocks
    )


def test_the_reference_averages_what_autograd_gives():
    model = models.Model(
        3, 2, 4, (models.Block("linear"),), False, (), (models.Pass((False, False)),), True, True
    )
    reference = nets.Reference(model)
    reference.pass_of(0, model.passes[0])
    net = nets.Net(model)
    sum(nets.loss_of(net, model, rank, 0, False) for rank in range(2)).backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(reference.gradients[1][name], parameter.grad / 2)


@pytest.mark.mpi
def test_random_models_train_as_in_one_process(world, capfd):
    # The deadline ends the process, so its message must not be captured.
    with capfd.disabled():
        deadline = Deadline(LIMIT_S, world.rank)
        with run_programs.torch_default_group():
            run_models.warm_up()
            for seed in range(COUNT.get(world.size, 8)):
                deadline.start(
                    f"mpirun -n {world.size} python -m tests.fuzz models --seed {seed} --count 1"
                )
                failures = run_models.run(models.model(seed, world.size), world, deadline)
                deadline.stop()
                assert not failures, f"seed {seed}: " + "\n".join(failures)
