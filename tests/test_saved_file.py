"""Reader of untrusted torch.save files: plain data, or an error with the reason."""

import os
import pickle
import struct
import zipfile

import pytest
import torch
from hypothesis import given, settings

from mpidist import saved_file
from mpidist.ddp import SAFE_GLOBALS, PowerSGDState
from tests.bytes_fuzz import checkpoints

CASES = int(os.environ.get("MPIDIST_FUZZ_CASES", "150"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.pt"


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_come_back_as_they_share_memory(path, mmap):
    base = torch.arange(12.0)
    leaf = torch.nn.Parameter(torch.ones(2))
    torch.save(
        {
            "base": base,
            "view": base.view(3, 4).t(),
            "leaf": leaf,
            "sparse": torch.eye(3).to_sparse(),
            "n": (1, {2}),
        },
        path,
    )
    found = saved_file.read(path, "cpu", mmap)
    assert (
        found["n"] == (1, {2})
        and type(found["leaf"]) is torch.nn.Parameter
        and torch.equal(found["sparse"].to_dense(), torch.eye(3))
    )
    found["base"][1] = 50.0
    assert found["view"][1, 0] == 50.0 and found["view"].stride() == (1, 4)


def test_what_is_not_mapped_outlives_the_file(path):
    torch.save([torch.arange(5000.0), torch.eye(3).to_sparse()], path)
    found = saved_file.read(path)
    with open(path, "r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert found[0].sum() == 5000 * 4999 / 2 and found[1].to_dense().trace() == 3


class Runs:
    has_run = False

    def __reduce__(self):
        return setattr, (Runs, "has_run", True)


def write(path, held):
    torch.save(held, path)


def changed(path, change, compression=zipfile.ZIP_STORED):
    path.write_bytes(checkpoints.rewritten(path.read_bytes(), change, compression))


def pickled(path, old, new, times=1):
    def change(members):
        (name,) = [name for name in members if name.endswith("data.pkl")]
        assert old in members[name]
        members[name] = members[name].replace(old, new, times)

    changed(path, change)


def outside(path):
    write(path, torch.sparse_coo_tensor(torch.tensor([[0, 77]]), torch.ones(2), (100,)))
    pickled(path, b"Kd", b"K\x05")  # the size


def longer(path):
    write(path, torch.arange(4.0))
    pickled(path, b"K\x04", b"J" + struct.pack("<i", 1 << 28), times=-1)


def linked(path):
    write(path.with_name("other"), 1)
    path.symlink_to(path.with_name("other"))


HOSTILE = {
    "code": (lambda path: write(path, [Runs()]), "Unsupported|Weights only|weights_only"),
    "one of our classes": (
        lambda path: write(path, [PowerSGDState.__new__(PowerSGDState)]),
        "Weights only",
    ),
    "one of our functions": (lambda path: write(path, [SAFE_GLOBALS[3]]), "Weights only"),
    "a bytearray": (lambda path: write(path, bytearray(3)), "bytearray"),
    "a tensor without memory": (lambda path: write(path, torch.ones(3, device="meta")), "on meta"),
    "a link": (linked, "no regular file"),
    "a folder": (lambda path: path.mkdir(), "no regular file"),
    "nothing": (lambda path: None, "is missing"),
    "a pickle alone": (lambda path: path.write_bytes(pickle.dumps(Runs())), "no archive"),
    "torch's old format": (
        lambda path: torch.save([1], path, _use_new_zipfile_serialization=False),
        "no archive",
    ),
    "a compressed archive": (
        lambda path: (write(path, torch.zeros(9999)), changed(path, dict, zipfile.ZIP_DEFLATED)),
        "compressed",
    ),
    "indices outside": (outside, "damaged"),
    "a storage longer than its member": (longer, "damaged"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused(path, name, mmap):
    Runs.has_run = False
    make, words = HOSTILE[name]
    make(path)
    with pytest.raises(ValueError, match=words):
        saved_file.read(path, "cpu", mmap)
    assert not Runs.has_run


def test_every_truncation_is_refused(path):
    write(path, {"a": torch.arange(5), "b": "text"})
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"file\.pt is damaged"):
            saved_file.read(path)


@settings(max_examples=CASES, deadline=None)
@given(checkpoints.cases(tuple(checkpoints.samples())))
def test_any_bytes_are_data_or_an_error(case):
    checkpoints.check(case)
