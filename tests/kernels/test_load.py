"""Availability of CuPy; no context is created on a device that is not used."""

from __future__ import annotations

import builtins
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from mpidist.kernels import load
from tests.comm.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch):
    made = FakeCuda()
    made.install(partial(monkeypatch.setattr, raising=False))
    load.is_available.cache_clear()
    load._module.cache_clear()
    yield made
    load.is_available.cache_clear()
    load._module.cache_clear()


class Device:
    """CuPy's device: at its end it restores the previous device, which creates a context there."""

    def __init__(self, cuda, index):
        self.cuda, self.index = cuda, index

    def __enter__(self):
        self.before = self.cuda.current
        if self.before != self.index:
            self.cuda.set_device(self.index)

    def __exit__(self, *error):
        self.cuda.set_device(self.before)


def use_cupy(monkeypatch, cuda):
    def compiled(**_):
        return SimpleNamespace(compile=lambda: cuda.use(cuda.current))

    made = SimpleNamespace(cuda=SimpleNamespace(Device=partial(Device, cuda)), RawModule=compiled)
    made.cuda.compiler = SimpleNamespace(CompileException=ValueError)
    monkeypatch.setitem(sys.modules, "cupy", made)


def test_kernels_are_compiled_on_the_tensors_device_alone(monkeypatch, cuda):
    use_cupy(monkeypatch, cuda)
    assert load.is_available(3)
    load._module("pack.cu", 3, ())
    assert cuda.contexts == [3] and cuda.current == 0


def importing(monkeypatch, error):
    real = builtins.__import__

    def fail(name, *args, **kwargs):
        if name == "cupy":
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", fail)


@pytest.mark.parametrize(
    "error",
    [
        # CuPy creates its cache folder when it is imported.
        OSError(30, "Read-only file system", "/home/user/.cupy/kernel_cache"),
        ImportError("libnvrtc.so.13: cannot open shared object file"),
    ],
)
def test_a_cupy_that_cannot_be_imported_warns_and_torch_computes(monkeypatch, cuda, error):
    importing(monkeypatch, error)
    with pytest.warns(UserWarning, match="CuPy cannot be used, so torch's operations"):
        assert not load.is_available(0)


def test_without_cupy_there_is_no_warning(monkeypatch, cuda, recwarn):
    importing(monkeypatch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    assert not load.is_available(0) and not recwarn.list
