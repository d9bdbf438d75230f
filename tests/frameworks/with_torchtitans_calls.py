"""Job with torchtitan's calls of torch.distributed, in its order, with a folder for checkpoints.

Source: torchtitan's distributed/utils.py, distributed/parallel_dims.py and
components/checkpointer/dcp.py, of August 2026.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.frameworks import evidence

EPOCHS = 2


def meshes(ranks):
    """Return the mesh of the world, flat and as pipeline × replicas × shards × tensor.

    Dimensions of one rank have no group.
    """
    world = init_device_mesh("cpu", (ranks,), mesh_dim_names=("world",))
    names = ("pp", "dp_replicate", "fsdp", "tp")
    alone = dict.fromkeys(("pp", "dp_replicate", "tp"), "fake")
    return world, world._unflatten(0, (1, 1, ranks, 1), names, backend_override=alone)


def sharded(mesh):
    model = evidence.model()
    for part in model:
        if list(part.parameters()):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, rank, ranks):
    inputs, targets = evidence.examples(ranks)
    optimizer = evidence.optimizer(model.parameters())
    norms, size = [], evidence.LOCAL_BATCH
    for _ in range(EPOCHS):
        for start in range(rank * size, len(inputs), ranks * size):
            optimizer.zero_grad()
            loss = evidence.loss_of(
                model, inputs[start : start + size], targets[start : start + size]
            )
            loss.backward()
            norm = torch.nn.utils.get_total_norm(
                [parameter.grad for parameter in model.parameters()]
            )
            norms.append(float(norm.full_tensor()))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e6, norm.full_tensor())
            optimizer.step()
    return loss.detach(), norms


def saved_and_loaded(model, mesh, folder, **how):
    dcp.async_save(get_model_state_dict(model), checkpoint_id=folder, **how).result()
    fresh = sharded(mesh)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(fresh, state)
    return fresh


def main(folder: str) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=300), _ranks=[], device_id=None
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world, dense = meshes(ranks)
    mesh = dense["fsdp"]
    model = sharded(mesh)
    loss, norms = train(model, rank, ranks)
    expected = evidence.reference(ranks, EPOCHS)
    facts = {"trained": evidence.distance(model, expected), "norms": norms}

    loss_mesh = dense["fsdp", "tp"]._flatten("loss_mesh")
    means = [
        funcol.all_reduce(loss, reduceOp="avg", group=group)
        for group in (world, loss_mesh, (dense, 2))
    ]
    facts["means"] = [float(mean) for mean in means]

    dist.barrier()
    for group in (mesh.get_group(), None):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=100), group)

    second_group = dist.new_group(backend="gloo")
    facts["in_thread"] = evidence.distance(
        saved_and_loaded(model, mesh, f"{folder}/thread", process_group=second_group), expected
    )
    how = {"process_group": second_group, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    facts["in_process"] = evidence.distance(
        saved_and_loaded(model, mesh, f"{folder}/process", **how), expected
    )
    evidence.report(rank, **facts)
    dist.destroy_process_group()


# Guarded, because the process that saves imports this file.
if __name__ == "__main__":
    main(sys.argv[1])
