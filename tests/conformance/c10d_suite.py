"""PyTorch's own tests of process groups and of ``DistributedDataParallel``, with Gloo as the peer.

Three modes: ``group`` runs the tests of collectives on our backend, ``torch_ddp`` those of data parallelism with torch's module on
it, ``our_ddp`` the same with ``mpidist.ddp.DistributedDataParallel`` in its place. A test that fails is repeated on Gloo, on the
same ranks in the same way: one that Gloo fails, too, says nothing of us.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import random
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.common_utils as common_utils
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from mpidist.ddp import DistributedDataParallel as OurDdp
from tests.conformance.c10d_module import distributed_test, needs
from tests.conformance.cuda_on_host import cuda_on_host, devices_of

_TIMEOUT_S = 8.0  # of a group; torch's own is 60
_HANG_S = 50.0  # of a test, after which the job ends with a traceback
_module = distributed_test()


class Alias(str):
    """The name of a backend that the suite takes for Gloo where a body chooses what it does by the name."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass
class Outcome:
    """One test's end on one rank: passed, skipped or failed, with the reason."""

    kind: str
    text: str = ""


class DistributedSuite(_module.DistributedTest._DistTestBase, common_utils.TestCase):
    """The suite; ``made`` fills in the attributes that its base expects."""

    rank: int
    world_size: int
    file_name: str
    counts: Any

    @property
    def init_method(self) -> str:
        return f"file://{self.file_name}"

    def _barrier(self, wait_for: int | None = None, timeout: float = _TIMEOUT_S) -> None:
        self.counts.meet(wait_for or self.world_size, timeout)


class Meetings:
    """Barriers by counting in a store: one that a rank never reaches ends in an error on the others."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._made = 0

    def meet(self, ranks: int, timeout_s: float) -> None:
        """Wait for ``ranks`` ranks."""
        self._made += 1
        if self._store.add(f"arrived{self._made}", 1) == ranks:
            self._store.set(f"all{self._made}", "1")
        self._store.wait([f"all{self._made}"], timedelta(seconds=timeout_s))


@functools.cache
def _server(key: int, rank: int, port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)


_made = 0


def _store(group: Any) -> Any:
    """Return a store that no other test uses. Collective: over ``group``."""
    global _made
    if _made == 0:
        first = _server(0, 0, 0) if group.rank == 0 else None
        port = group.broadcast_object(first.port if first else None)
        _store.server = first or _server(0, group.rank, port)
    _made += 1
    return dist.PrefixStore(str(_made), _store.server)


class TorchOnHost(TorchDdp):
    """torch's module without its arguments that name devices: there is only the host."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, None, None, *args, **kwargs)


class OurOnHost(OurDdp):
    """Ours likewise."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, None, None, *args, **kwargs)


_ON_HOST = {TorchDdp: TorchOnHost, OurDdp: OurOnHost}


def _strided() -> Any:
    # Its convolutions of 1000 x 1000 pixels take a CPU seconds each, in hundreds of passes; their parameters are what matters.
    return mock.patch.object(torch.nn, "Conv2d", functools.partial(torch.nn.Conv2d, stride=8))


PREPARED = {"test_ddp_uneven_inputs": _strided}


@contextlib.contextmanager
def _surroundings(backend: str, ddp: Any, cuda: bool, ranks: int, folder: str) -> Iterator[None]:
    init_file = os.path.join(folder, f"init-{backend}")
    names = {"BACKEND": Alias(backend), "INIT_METHOD": f"file://{init_file}", "DistributedDataParallel": ddp}
    environment = {"BACKEND": backend, "WORLD_SIZE": str(ranks), "TEMP_DIR": folder, "INIT_METHOD": f"file://{init_file}"}
    with contextlib.ExitStack() as stack:
        if cuda:
            names["init_multigpu_helper"] = devices_of
            stack.enter_context(cuda_on_host(ranks))
        stack.enter_context(mock.patch.dict(os.environ, {**environment, "MPIDIST_ON_TIMEOUT": "raise"}))
        stack.enter_context(mock.patch.multiple(_module, **names))
        stack.enter_context(mock.patch.object(torch.nn.parallel, "DistributedDataParallel", ddp))
        # pytest's handlers; torch runs each test in a process of its own.
        stack.enter_context(mock.patch.object(logging.getLogger(), "handlers", []))
        yield


def _init(backend: str, group: Any, store: Any) -> None:
    timeout = timedelta(seconds=_TIMEOUT_S)
    if backend == "gloo":
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def attempt(name: str, backend: str, ddp: Any, group: Any) -> Outcome:
    """Run one test once.

    Collective: over ``group``.
    """
    store = _store(group)
    folder = group.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else None)
    if group.rank == 0:
        for inner in ("barrier", "test_dir"):
            os.mkdir(os.path.join(folder, inner))
    cuda = needs(name).cuda
    test = DistributedSuite(name)
    test.rank, test.world_size, test.file_name = group.rank, group.size, os.path.join(folder, "file")
    test.counts = Meetings(store)
    common_utils.set_rng_seed()
    faulthandler.dump_traceback_later(_HANG_S, exit=True)
    try:
        prepared = PREPARED.get(name, contextlib.nullcontext)()
        with prepared, _surroundings(backend, _ON_HOST[ddp] if cuda else ddp, cuda, group.size, folder):
            _init(backend, group, dist.PrefixStore("group", store))
            getattr(test, name)()
            test._barrier()
    except unittest.SkipTest as skip:
        return Outcome("skipped", str(skip))
    except SystemExit as end:
        return Outcome("skipped" if end.code else "passed", f"exit {end.code}")
    except BaseException:
        return Outcome("failed", traceback.format_exc())
    finally:
        test.doCleanups()
        _clean_up()
        faulthandler.cancel_dump_traceback_later()
    return Outcome("passed")


def _clean_up() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    dist.set_debug_level_from_env()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@dataclass
class Verdict:
    """One test's end over all ranks: ``kind`` is passed, failed, or why it says nothing of us."""

    kind: str
    text: str
    seconds: float


def verdict(name: str, mode: str, group: Any) -> Verdict:
    """Run a test on our backend, and on Gloo if it fails. Collective: over ``group``."""
    start = time.monotonic()
    ddp = OurDdp if mode == "our_ddp" else TorchDdp
    ours = group.all_gather_object(attempt(name, "mpidist", ddp, group))
    kind, text = _together(ours)
    if kind == "failed":
        theirs, _ = _together(group.all_gather_object(attempt(name, "gloo", TorchDdp, group)))
        if theirs != "passed":
            kind = "need a GPU (Gloo fails them, too)" if needs(name).cuda else "fail on Gloo, too"
    return Verdict(kind, text, time.monotonic() - start)


def _together(outcomes: list[Outcome]) -> tuple[str, str]:
    kinds = {outcome.kind for outcome in outcomes}
    text = "\n".join(f"rank {rank}: {outcome.text}" for rank, outcome in enumerate(outcomes) if outcome.text)
    return next(kind for kind in ("failed", "skipped", "passed") if kind in kinds), text
