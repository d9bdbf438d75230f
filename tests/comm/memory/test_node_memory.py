"""Anonymous files as memory: mapped by descriptor, identified by a mark, and freed."""

import gc
import os

import pytest
import torch

from mpidist.comm.memory import node_memory


def files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_mapping_is_the_same_memory_until_the_last_is_gone():
    before = files()
    own = node_memory.created(1000)
    other = node_memory.mapped(own.address, 1000)
    assert own[:1000] == bytes(1000) and node_memory.nbytes_of(other) == 1000
    own[999] = 7
    assert other[999] == 7
    other[0] = 5
    assert own[0] == 5
    address = own.address
    own.close_file()
    own.close_file()
    assert node_memory.mapped(address, 1000) is None
    del own
    assert other[999] == 7
    del other
    assert files() == before


@pytest.mark.parametrize("wrong", ["process", "file", "mark", "size"])
def test_another_file_is_not_mapped(wrong):
    own, other = node_memory.created(5000), node_memory.created(5000)
    address, nbytes = own.address, 5000
    if wrong == "process":
        address = address._replace(process=1 << 30)
    elif wrong == "file":
        address = address._replace(file=other.address.file)
    elif wrong == "mark":
        address = address._replace(mark=address.mark ^ 1)
    else:
        nbytes = 50_000
    before = files()
    assert node_memory.mapped(address, nbytes) is None
    assert files() == before


@pytest.mark.parametrize("missing", ["memfd_create", "posix_fallocate"])
def test_an_error_leaves_no_file(missing, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("not here")

    before = files()
    monkeypatch.setattr(os, missing, refuse)
    with pytest.raises(OSError, match="not here"):
        node_memory.created(100)
    monkeypatch.undo()
    assert files() == before


def test_tensors_are_found_by_their_storage():
    before = files()
    with torch.inference_mode():
        tensor = node_memory.allocated((3, 4), torch.float64)
    assert not tensor.is_inference() and tensor.shape == (3, 4) and not tensor.any()
    memory, offset = node_memory.found(tensor)
    assert offset == 0 and node_memory.nbytes_of(memory) == 96
    assert node_memory.found(tensor[1:].view(-1)[2:]) == (memory, 48)
    other = node_memory.mapped(memory.address, 96)
    seen = torch.frombuffer(other, dtype=torch.float64, count=12)
    tensor[2, 3] = 1.5
    assert seen[11] == 1.5
    assert node_memory.found(torch.zeros(12)) is None
    assert node_memory.found(tensor.clone()) is None
    assert node_memory.found(node_memory.allocated((0,), torch.int8)) is None
    assert node_memory.found(torch.empty(0)) is None
    assert node_memory.found(tensor[3:]) is None
    del tensor, memory, other, seen
    assert files() == before
