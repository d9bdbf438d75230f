"""Parameters in flat buffers: layouts, forked processes, torch.save, and freed memory."""

from __future__ import annotations

import gc
import io
import os

import pytest
import torch

from mpidist.zero.optimizer import OSS
from tests.tools.support import agree
from tests.zero import nets


def small(group, way="node"):
    """Return a sharded optimizer over two vectors after one step."""
    with nets.memory(way) as chosen:
        parameters = [torch.nn.Parameter(torch.arange(5000.0)), torch.nn.Parameter(torch.ones(10))]
        sharded = OSS(parameters, torch.optim.SGD, group, lr=1.0, **chosen)
        nets.give_gradients(parameters, 0)
        sharded.step()
    return sharded, parameters


@pytest.mark.mpi
def test_one_saved_parameter_drags_the_buffer_along_and_its_clone_does_not(group):
    _, (large, little) = small(group)
    sizes = []
    for saved in (little, little.detach().clone()):
        file = io.BytesIO()
        torch.save(saved, file)
        sizes.append(file.tell())
        file.seek(0)
        agree(group, torch.equal(torch.load(file), little))
    agree(group, sizes[0] > large.nbytes > 5000 > sizes[1], str(sizes))


class Read(torch.utils.data.Dataset):
    """Data set that reads parameters in a worker, and optionally writes them."""

    def __init__(self, parameters, writes):
        self.parameters, self.writes = parameters, writes

    def __len__(self):
        return 4

    def __getitem__(self, place):
        held = self.parameters[0].detach()
        if self.writes:
            held[place] = -7.0
        return held[100:110].clone()


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_workers_read_parameters_and_what_they_write_all_of_the_node_see(group):
    """Buffers are shared with forked children, unlike other memory: a child's write is visible."""
    sharded, parameters = small(group)
    for writes in (False, True):
        loader = torch.utils.data.DataLoader(
            Read(parameters, writes), num_workers=2, multiprocessing_context="fork"
        )
        agree(
            group,
            all(
                torch.equal(row, parameters[0].detach()[100:110])
                for batch in loader
                for row in batch
            ),
        )
        is_shared = group.size > 1 and group.is_single_node
        seen = bool((parameters[0][:4] == -7).all())
        agree(group, seen == (writes and is_shared), f"{writes} {parameters[0][:4]}")
    nets.give_gradients(parameters, 1)
    sharded.step()


@pytest.mark.mpi
@pytest.mark.parametrize("way", nets.WAYS)
def test_memory_is_given_back_with_the_last_parameter_and_no_file_stays(group, way):
    def open_files():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:mpidist" in line for line in maps)

    small(group, way)  # makes what stays allocated
    before = open_files()
    sharded, parameters = small(group, way)
    parameters.append(torch.nn.Parameter(torch.ones(70)))
    sharded.add_param_group({"params": parameters[2:]})
    values = parameters[0].detach().clone()
    with pytest.raises(TypeError, match="momentun"):
        OSS(parameters[:1], torch.optim.SGD, group, lr=1.0, momentun=0.9)
    del sharded
    gc.collect()
    agree(group, torch.equal(parameters[0], values), "parameters outlive their optimizer")
    parameters.clear()
    after = open_files()
    agree(group, after[0] <= before[0] and after[1] <= before[1], f"{before} {after}")


@pytest.mark.mpi
def test_the_one_copy_is_one_and_holds_the_first_ranks_values(group):
    parameters = [
        torch.nn.Parameter(torch.full((100,), float(group.rank))),
        torch.nn.Parameter(torch.ones(3)),
    ]
    sharded = OSS(parameters, torch.optim.SGD, group, lr=1.0, one_copy=True)
    first = group._comm.nodes.index(group._comm.nodes[group.rank])
    agree(group, bool((parameters[0] == first).all()))
    group.barrier()
    if group.size > 1 and group.is_single_node:
        if group.rank == group.size - 1:
            parameters[1].data.fill_(5.0)
        group.barrier()
        agree(group, bool((parameters[1] == 5).all()))
        agree(group, sharded._shards.is_one_copy)
    group.barrier()
