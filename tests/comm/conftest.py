"""Fixture of tests that run on device memory."""

import pytest

from mpidist.comm.algorithms import host_copies, ring, staging
from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.ring import Ring
from tests.comm.places import Cuda, Lazy


@pytest.fixture(
    params=[
        ("lazy", None, "0"),
        ("lazy", None, "1"),
        ("lazy", 1, "0"),
        ("lazy", 2, "1"),
        ("lazy", 3, "1"),
        pytest.param(("cuda", None, ""), marks=pytest.mark.gpu),
        pytest.param(("cuda", None, "0"), marks=pytest.mark.gpu),
    ],
    ids=lambda p: f"{p[0]}-seed {p[1]}-aware {p[2]}",
)
def place(request, monkeypatch):
    """A device, with or without an MPI that takes its addresses; chunks are short."""
    kind, seed, aware = request.param
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", aware)
    monkeypatch.setattr(ring, "CHUNK_BYTES", 256)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 192)
    monkeypatch.setattr(host_copies, "PINNED_BYTES", 1500)
    made = Lazy(monkeypatch, seed) if kind == "lazy" else Cuda()
    yield made
    assert kind == "cuda" or made.device.strays == []


@pytest.fixture
def own_recorder(monkeypatch, tmp_path):
    """Return a recorder for this test alone: the process's may have no room for more names."""
    made = Ring(tmp_path / "recorder")
    monkeypatch.setattr(recorder, "of_process", lambda: made)
    yield made
    made.close()
