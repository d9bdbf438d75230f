"""PyTorch's tests of process groups and ``DistributedDataParallel``, with Gloo for comparison.

Three modes: ``group`` runs the tests of collectives on mpidist's backend, ``torch_ddp`` the tests
of data parallelism with torch's module on that backend, ``our_ddp`` the same tests with
``mpidist.ddp.DistributedDataParallel``. A failed test is repeated on Gloo on the same ranks: if
Gloo fails, too, the test does not apply.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import shutil
import tempfile
import traceback
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.common_utils as common_utils
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from mpidist.ddp import DistributedDataParallel as OurDdp
from tests.conformance.c10d_module import distributed_test, needs
from tests.conformance.cuda_on_host import cuda_on_host, devices_of

MODES = ("group", "torch_ddp", "our_ddp")
NEEDS_GPU, GLOO_FAILS = "need a GPU (Gloo fails them on the host, too)", "fail on Gloo, too"
# Timeout of a group; torch uses 60.
_TIMEOUT_S = 8.0
# Limit of a test, after which the job ends with a traceback.
_HANG_S = 100.0
_module = distributed_test()


class Alias(str):
    """Backend name that equals "gloo" where a test selects its body by the name."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class TorchOnHost(TorchDdp):
    """torch's module without device arguments, because all tensors are on the host."""

    def __init__(
        self,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, None, None, *args, **kwargs)


class OurOnHost(OurDdp):
    """mpidist's module without device arguments."""

    def __init__(
        self,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, None, None, *args, **kwargs)


_ON_HOST = {TorchDdp: TorchOnHost, OurDdp: OurOnHost}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test on one rank or on all: passed, skipped, failed or not applicable."""

    kind: str
    text: str = ""


class StoreBarrier:
    """Barriers by counters in a store; a rank that stays away causes a timeout on the others."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._made = 0

    def wait(self, ranks: int, timeout_s: float) -> None:
        """Wait for ``ranks`` ranks."""
        self._made += 1
        if self._store.add(f"arrived{self._made}", 1) == ranks:
            self._store.set(f"all{self._made}", "1")
        self._store.wait([f"all{self._made}"], timedelta(seconds=timeout_s))


class DistributedSuite(_module.DistributedTest._DistTestBase, common_utils.TestCase):
    """Suite of distributed tests; ``attempt`` sets the attributes that its base expects."""

    rank: int
    world_size: int
    file_name: str
    store_barrier: StoreBarrier

    @property
    def init_method(self) -> str:
        return f"file://{self.file_name}"

    def _barrier(self, wait_for: int | None = None, timeout: float = _TIMEOUT_S) -> None:
        self.store_barrier.wait(wait_for or self.world_size, timeout)


class Runner:
    """Execution of tests on a group that carries only verdicts.

    Collective: all ranks of the group create it and make the same calls.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        port = 0
        if group.rank == 0:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._server.port
        port = group.broadcast_object(port)
        if group.rank:
            self._server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._attempts = 0

    def outcome(self, name: str, mode: str) -> Outcome:
        """Run a test on mpidist, after a failure on Gloo; return the same outcome on all ranks."""
        outcome = self._on_all(name, "mpidist", OurDdp if mode == "our_ddp" else TorchDdp)
        if outcome.kind == "failed" and self._on_all(name, "gloo", TorchDdp).kind != "passed":
            return Outcome(NEEDS_GPU if needs(name).cuda else GLOO_FAILS, outcome.text)
        return outcome

    def _on_all(self, name: str, backend: str, ddp: Any) -> Outcome:
        folder = self._group.broadcast_object(tempfile.mkdtemp() if self._group.rank == 0 else None)
        self._attempts += 1
        store = dist.PrefixStore(f"{self._attempts}", self._server)
        ended = self._group.all_gather_object(
            _attempt(name, backend, ddp, self._group.rank, self._group.size, store, folder)
        )
        shutil.rmtree(folder, ignore_errors=True)
        return together(ended)


def together(ended: Sequence[Outcome]) -> Outcome:
    """Return the common outcome: failed if any rank failed, else skipped if any rank skipped."""
    kinds = {outcome.kind for outcome in ended}
    text = "\n".join(
        f"rank {rank}: {outcome.text}" for rank, outcome in enumerate(ended) if outcome.text
    )
    return Outcome(next(kind for kind in ("failed", "skipped", "passed") if kind in kinds), text)


def _attempt(
    name: str, backend: str, ddp: Any, rank: int, size: int, store: Any, folder: str
) -> Outcome:
    for inner in ("barrier", "test_dir"):
        os.makedirs(os.path.join(folder, inner), exist_ok=True)
    is_cuda = needs(name).cuda
    test = DistributedSuite(name)
    test.rank, test.world_size, test.file_name = rank, size, os.path.join(folder, "file")
    test.store_barrier = StoreBarrier(store)
    common_utils.set_rng_seed()
    faulthandler.dump_traceback_later(_HANG_S, exit=True)
    try:
        with (
            PREPARED.get(name, contextlib.nullcontext)(),
            _names_bound(backend, ddp, is_cuda, size, folder),
        ):
            _init(backend, rank, size, dist.PrefixStore("group", store))
            getattr(test, name)()
            # A rank that has finished destroys its group, which other ranks may still use.
            test._barrier()
    except unittest.SkipTest as skip:
        return Outcome("skipped", str(skip))
    except BaseException:
        return Outcome("failed", traceback.format_exc())
    finally:
        test.doCleanups()
        # The test may have destroyed the group partly.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        dist.set_debug_level_from_env()
        faulthandler.cancel_dump_traceback_later()
    return Outcome("passed")


def _init(backend: str, rank: int, size: int, store: Any) -> None:
    timeout = timedelta(seconds=_TIMEOUT_S)
    if backend == "gloo":
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


@contextlib.contextmanager
def _names_bound(backend: str, ddp: Any, is_cuda: bool, size: int, folder: str) -> Iterator[None]:
    url = f"file://{folder}/init"
    names = {"BACKEND": Alias(backend), "INIT_METHOD": url, "DistributedDataParallel": ddp}
    environment = {
        "BACKEND": backend,
        "WORLD_SIZE": str(size),
        "TEMP_DIR": folder,
        "INIT_METHOD": url,
    }
    with contextlib.ExitStack() as stack:
        if is_cuda:
            ddp = _ON_HOST[ddp]
            names |= {"init_multigpu_helper": devices_of, "DistributedDataParallel": ddp}
            stack.enter_context(cuda_on_host())
        # A collective that waits for a rank with a failed test raises an error, and the job
        # continues.
        stack.enter_context(
            mock.patch.dict(os.environ, {**environment, "MPIDIST_ON_TIMEOUT": "raise"})
        )
        stack.enter_context(mock.patch.multiple(_module, **names))
        stack.enter_context(mock.patch.object(torch.nn.parallel, "DistributedDataParallel", ddp))
        # Remove pytest's handlers, because torch runs each test in its own process.
        stack.enter_context(mock.patch.object(logging.getLogger(), "handlers", []))
        yield


def _strided() -> Any:
    # Convolutions of 1000 x 1000 pixels take a CPU seconds, in hundreds of passes; only their
    # parameters matter here.
    return mock.patch.object(torch.nn, "Conv2d", functools.partial(torch.nn.Conv2d, stride=8))


PREPARED = {"test_ddp_uneven_inputs": _strided}
