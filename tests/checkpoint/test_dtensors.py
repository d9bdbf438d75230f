"""DTensors as plain data: parts and layouts, states that have another layout, damaged parts."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mpidist.checkpoint import dtensors
from mpidist.checkpoint.plain_data import require_plain
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]


def test_parts_come_back_on_ranks_of_the_same_layout(group):
    mesh = init_device_mesh("cpu", (group.size,))
    rows = torch.arange(float(2 * group.size + 1))[:, None] * torch.ones(3)
    scalar = torch.tensor(2.0)

    def made(placement, values=rows):
        return distribute_tensor(values.clone(), mesh, [placement]).requires_grad_()

    def stepped(parameters):
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    weight, bias, plain = made(Shard(0)), made(Replicate(), scalar), torch.ones(2).requires_grad_()
    model = {"weight": weight, "bias": bias, "plain": plain}
    optimizer = stepped(list(model.values()))
    others, saved = dtensors.content(model, optimizer)
    require_plain("the state", saved)
    assert others == {"plain": plain} and list(saved["model"]) == ["weight", "bias"]
    assert saved["sharded"] == {0: ["exp_avg", "exp_avg_sq"], 1: ["exp_avg", "exp_avg_sq"], 2: []}

    target = {"weight": made(Shard(0)), "bias": made(Replicate(), scalar), "plain": plain}
    found = dtensors.model_state(saved, target)
    same = [torch.equal(found[name].to_local(), model[name].to_local()) for name in found]
    state = dtensors.optimizer_state(saved, torch.optim.Adam(target.values()))
    pairs = zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True)
    for one, other in pairs:
        for name, value in one.items():
            assert dtensors.layout(value) == dtensors.layout(other[name])
            parts = [getattr(each, "_local_tensor", each) for each in (value, other[name])]
            same.append(torch.equal(*parts))
    agree(group, all(same) and len(same) == 2 + 9)

    with pytest.raises(ValueError, match=r"weight is a DTensor .*there, and a plain tensor here"):
        dtensors.model_state(saved, {"weight": rows})
    with pytest.raises(ValueError, match=r"plain is a plain tensor there, and a DTensor"):
        dtensors.model_state(saved, {**target, "plain": made(Shard(0))})
    with pytest.raises(ValueError, match="parameter 0 is a DTensor"):
        dtensors.optimizer_state(
            saved, torch.optim.Adam([plain, bias, torch.ones(2).requires_grad_()])
        )
    with pytest.raises(ValueError, match="has 3 parameters, this one 1"):
        dtensors.optimizer_state(saved, torch.optim.Adam([plain]))
    with pytest.raises(ValueError, match="a local tensor has shape"):
        dtensors.model_state({**saved, "model": {"weight": torch.ones(9, 9)}}, target)
    optimizer.state[weight]["exp_avg"] = made(Replicate())
    with pytest.raises(TypeError, match="of parameter 0 has another layout"):
        dtensors.content(model, optimizer)
