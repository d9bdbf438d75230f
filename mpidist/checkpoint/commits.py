"""Commits: a run's state in the memory of its nodes, with a copy of each rank's on another node.

All ranks write the files of a checkpoint into one slot of their node's memory (``slots``): what a
rank alone holds is in its own file, and what all ranks hold is written once a node. When all have
written, each node's first rank writes the manifest. A rank's own files then go to its buddy on the
next node while the training continues, on a group and thread of their own. A commit is whole where
every file of it is in some node's memory, so it survives the death of any processes, and of a node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from mpidist.checkpoint import (
    buddies,
    digested_file,
    files,
    manifest,
    progress,
    replicas,
)
from mpidist.checkpoint.manifest import TRAINING, Entry, Manifest
from mpidist.checkpoint.saving import count, group_of, versions
from mpidist.checkpoint.slots import Slots
from mpidist.checkpoint.training import Stateful, Training
from mpidist.comm.consistency import comparing, same_error_on_all
from mpidist.comm.execution.work import Work
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.mpi import job_folder, runtime
from mpidist.comm.recorder import recorder
from mpidist.errors import CheckpointError, MpidistError
from mpidist.file_errors import naming

_WHERE = "checkpoint.commit"
# By the group's key and the run's folder.
_commits: dict[tuple[str, str], Commits] = {}


def commit(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    hook_state: Stateful | None = None,
    sampler: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: object = None,
    rng: bool = True,
    group: AnyGroup = None,
) -> None:
    """Keep the state of a run in the memory of its nodes, where ``load`` finds it.

    The replicated parameters are compared between the ranks by one 64-bit sum: a rank whose memory
    or cores are at fault is named. The last two commits are kept. A rank that dies within a commit
    leaves the one before. The memory is freed when the job's last process on the node ends; a
    killed job leaves it to its successors, or to ``mpidist clean``.

    Collective: over the group, between steps.

    Blocks: until all ranks have written, at memory speed. The copies to other nodes are sent
    afterwards; the next commit waits for them.

    Args:
        folder: Of the run's checkpoints, as for ``save``; nothing is written there. ``load`` of the
            same folder takes the newest of its checkpoints and the commits.
        step: Number of steps so far, above that of the last commit.
        model: As for ``save``, as all following arguments are.

    Raises:
        CheckpointError: A rank could not write, as its node's memory is full or another user's, or
            the memory holds a commit of this or a later step; the commit before stays (all ranks).
        ReplicaError: The ranks' parameters differ; the commit before stays (all ranks).
        TypeError, ValueError: A wrong argument, before anything is written.
        DisagreementError: Ranks give different arguments, or another rank's is wrong.
    """
    native = group_of(group, model)
    training = Training(model, optimizer, hook_state, sampler, scheduler, scaler)
    with comparing(native, _WHERE) as rows:
        step = count(_WHERE, "step", step, 0)
        training.require_usable(native.rank, native.size)
        rows += [("folder", files.absolute(folder)), ("step", step)]
    with recorder.recorded("commit", _WHERE):
        _of(native, folder).write(step, training, extra, bool(rng))


def held(group: Group, folder: str | os.PathLike[str]) -> Held | None:
    """Return the newest commit whose files all are in the memory of some node, or None.

    Collective: over the group.

    Raises:
        CheckpointError: A manifest is damaged or of another version, or the memory is another
            user's (all ranks).
    """
    return _of(group, folder).held()


def _of(group: Group, folder: str | os.PathLike[str]) -> Commits:
    for key, one in list(_commits.items()):
        if one.group.is_closed:
            one.leave()
            del _commits[key]
    key = group.key, files.absolute(folder)
    if key not in _commits:
        _commits[key] = Commits(group, Path(folder))
    return _commits[key]


def _drop() -> None:
    for one in _commits.values():
        one.leave()
    _commits.clear()


runtime.belongs_to_world(_drop)


class Commits:
    """Commits of one run on one rank.

    Args:
        group: The run's ranks.
        folder: Of the run's checkpoints.

    Attributes:
        has_passed_over: A load has looked for commits and taken none, and no commit has followed.
        has_written: This process has written a commit, so that what is held is its own.
    """

    def __init__(self, group: Group, folder: Path) -> None:
        world = runtime.world()
        self.group = group
        self.slots = Slots(world.job, folder)
        self.nodes = world.nodes_of(group.world_ranks)
        here = buddies.members(self.nodes[group.rank], self.nodes)
        self.place, self.neighbours = here.index(group.rank), len(here)
        every = [buddies.buddy_of(rank, self.nodes) for rank in range(group.size)]
        self._buddy = every[group.rank]
        self._senders = [rank for rank, buddy in enumerate(every) if buddy == group.rank]
        self.has_passed_over = False
        self.has_written = False
        self._sending: Group | None = None
        self._work: Work | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes what its node holds once."""
        return self.place == 0

    def write(self, step: int, training: Training, extra: object, with_rng: bool) -> None:
        """Write one commit. Collective: over the group."""
        where = f"{_WHERE} of step {step}"
        contents = training.contents(with_rng)
        total = 0
        with comparing(self.group, where) as rows:
            rows.append(("state of", str(contents)))
            total = replicas.checksum(training.replicated())
            own = training.files(
                contents, extra, self.group.rank, self.group.size, has_shared=self.is_first
            )
        if len(set(self.nodes)) > 1:
            # Rank 0's is saved, and other ranks may have other objects there.
            shared = self.group.broadcast_object(own.get(TRAINING), 0)
            if self.is_first:
                own[TRAINING] = shared
        self._finish_sending(where)
        slot = self._next_slot(step, total, where)
        opened: list[BinaryIO] = []
        try:
            with self.same_error(where):
                if self.is_first:
                    self.slots.begin(slot, manifest.required(self.group.size, contents))
            with self.same_error(where):
                path = self.slots.path(slot)
                entries = {
                    name: digested_file.overwrite(path / name, value) for name, value in own.items()
                }
                # An open file has its contents until they are sent, whoever removes its name.
                if self._buddy is not None:
                    for name in sorted(filter(manifest.is_of_rank, own)):
                        opened.append((path / name).open("rb"))
            tables = self.group.all_gather_object(
                {name: (entry.bytes, entry.digest) for name, entry in entries.items()}
            )
            with self.same_error(where):
                if self.is_first:
                    # Files that each node writes itself may differ in bytes.
                    mine = self.nodes[self.group.rank]
                    every = {
                        name: Entry(*row)
                        for node, table in zip(self.nodes, tables, strict=True)
                        for name, row in table.items()
                        if node == mine or manifest.is_of_rank(name)
                    }
                    written = Manifest(step, self.group.size, every, contents, versions())
                    self.slots.commit(slot, written)
                if self.group.rank == 0:
                    progress.note(step)
        except MpidistError:
            for file in opened:
                file.close()
            if self.is_first:
                self.slots.drop(slot)
            raise
        self.has_passed_over, self.has_written = False, True
        self._start_sending(slot, tables, opened)

    def held(self) -> Held | None:
        """Return the newest whole commit. Collective: over the group."""
        self._finish_sending("checkpoint.load")
        self.has_passed_over = True
        with self.same_error("checkpoint.load"):
            manifests = self.slots.found()
            # Each rank checks a part of its node's files.
            sound = {slot: self._sound_share(slot, found) for slot, found in manifests.items()}
        rows = self.group.all_gather_object(
            {
                slot: (
                    manifests[slot].step,
                    sorted(names),
                    manifest.to_json(manifests[slot]) if self.is_first else None,
                )
                for slot, names in sound.items()
            }
        )
        by_step: dict[int, list[set[str]]] = {}
        texts_of: dict[int, list[str | None]] = {}
        slot_of: dict[int, int] = {}
        for rank, row in enumerate(rows):
            for slot, (step, names, text) in row.items():
                slot_of[step] = slot
                tables = by_step.setdefault(step, [set() for _ in self.nodes])
                for other in buddies.members(self.nodes[rank], self.nodes):
                    tables[other] |= set(names)
                texts_of.setdefault(step, [None for _ in self.nodes])[rank] = text
        for step in sorted(by_step, reverse=True):
            slot = slot_of[step]
            found = _whole(by_step[step], texts_of[step], self.nodes, self.group.rank)
            if found is not None:
                return Held(self, step, slot, *found)
        return None

    def leave(self) -> None:
        """Give up the group of the copies; the node's memory stays."""
        if self._sending is not None:
            self._sending.close()

    def same_error(self, where: str) -> AbstractContextManager[None]:
        """Return a context whose error is raised on all ranks; see ``same_error_on_all``."""
        return same_error_on_all(self.group, CheckpointError, where)

    def _sound_share(self, slot: int, found: Manifest) -> set[str]:
        path = self.slots.path(slot)
        share = {
            name: found.files[name]
            for name in files.share_of(found.files, self.place, self.neighbours)
            if (path / name).exists()
        }
        return {name for name in share if not files.problems(path, {name: share[name]})}

    def _next_slot(self, step: int, total: int, where: str) -> int:
        """Compare the replicas' checksums; return the slot that does not hold the newest commit.

        Collective: over the group.
        """
        with self.same_error(where):
            self.slots.open()
            steps = {slot: found.step for slot, found in self.slots.found().items()}
        found_of, totals = zip(*self.group.all_gather_object((steps, total)), strict=True)
        replicas.require_same(where, totals, self.group.world_ranks)
        every = [row for rows in found_of for row in rows.items()]
        if not every:
            return 0
        newest, last = max((found, slot) for slot, found in every)
        if newest < step:
            return 1 - last
        if not self.has_passed_over:
            raise CheckpointError(
                f"{where}: the memory of a node holds a commit of step {newest}, which the next "
                f"start would take: load it first, or {job_folder.ADVICE}"
            )
        # The load has passed over them, because some of their files are lost.
        with self.same_error(where):
            for slot, found in steps.items():
                if self.is_first and found >= step:
                    self.slots.drop(slot)
        before = [(found, slot) for slot, found in every if found < step]
        return 1 - max(before)[1] if before else 0

    def _start_sending(
        self, slot: int, tables: Sequence[dict[str, tuple[int, str]]], opened: Sequence[BinaryIO]
    ) -> None:
        if len(set(self.nodes)) == 1:
            return
        if self._sending is None:
            self._sending = self.group.clone(f"{self.group.name}/commits")
            self._sending.end_with_world()
        group, path = self._sending, self.slots.path(slot)

        def send() -> None:
            contents = [_content(file) for file in opened]
            assert self._buddy is not None
            sends = [group.isend(one, self._buddy, tag) for tag, one in enumerate(contents)]
            failed: OSError | None = None
            for rank in self._senders:
                for tag, name in enumerate(sorted(filter(manifest.is_of_rank, tables[rank]))):
                    try:
                        _receive(group, path / name, tables[rank][name][0], rank, tag)
                    except OSError as error:
                        # The next copies are received all the same: their senders wait for it.
                        failed = failed or error
            for work in sends:
                work.wait()
            if failed is not None:
                raise failed

        self._work = group.in_order(send, async_op=True, operation="commit")

    def _finish_sending(self, where: str) -> None:
        """Wait for the copies of the last commit. Collective: over the group.

        Raises:
            CheckpointError: A rank could not write a copy (all ranks).
        """
        work, self._work = self._work, None
        # Set on all ranks, or on none.
        if work is not None:
            with self.same_error(f"{where}, copies of the last commit"):
                work.wait()


@dataclass(frozen=True)
class Held:
    """A commit of which every file is in the memory of some node.

    Attributes:
        commits: Of the run.
        step: Of the commit.
        slot: The slot of all nodes that have it.
        names: Names of sound files on the rank's node, by rank.
        manifest: Of this rank's node, or of the first node that has one.
    """

    commits: Commits
    step: int
    slot: int
    names: Sequence[set[str]]
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Return the folder of this node's files."""
        return self.commits.slots.path(self.slot)

    def take(self) -> None:
        """Make the commit the newest one on all nodes. Collective: over the group."""
        commits = self.commits
        with commits.same_error("checkpoint.load"):
            commits.slots.open()
            if commits.is_first:
                found = commits.slots.found()
                other, own = found.get(1 - self.slot), found.get(self.slot)
                if other is not None and other.step >= self.step:
                    commits.slots.drop(1 - self.slot)
                if own is None or own.step != self.step:
                    commits.slots.begin(self.slot, ())
        commits.has_passed_over = False

    def bring(self, names: Sequence[str]) -> None:
        """Bring the files that ranks need to their nodes. Collective: over the group."""
        commits = self.commits
        group, rank = commits.group, commits.group.rank
        wanted = group.all_gather_object(list(names))
        copies = buddies.copies(wanted, self.names, commits.nodes)
        with commits.same_error("checkpoint.load"):
            # A file that has been removed since is an error before a rank waits for it.
            sent = [(self.path / name).open("rb") for name, source, _ in copies if rank == source]
        opened = iter(sent)
        failed: OSError | None = None
        for name, source, dest in copies:
            if rank == source:
                group.send(_content(next(opened)), dest)
            elif rank == dest:
                nbytes = self.manifest.files[name].bytes
                try:
                    _receive(group, self.path / name, nbytes, source, 0)
                except OSError as error:
                    # The next files are received all the same: their senders wait for it.
                    failed = failed or error
            for other in buddies.members(commits.nodes[dest], commits.nodes):
                self.names[other].add(name)
        with commits.same_error("checkpoint.load"):
            if failed is not None:
                raise failed
            if commits.is_first and not (self.path / manifest.NAME).exists():
                commits.slots.commit(self.slot, self.manifest)


def _whole(
    tables: list[set[str]], texts: Sequence[str | None], nodes: Sequence[int], rank: int
) -> tuple[list[set[str]], Manifest] | None:
    """Return names and manifest of a commit if every file of it is on some node, else None.

    Pure.

    Args:
        tables: Names of sound files on each rank's node.
        texts: The manifest of each node, on the node's first rank.
        nodes: Node of each rank.
        rank: The rank whose manifest is returned.
    """
    first = [nodes.index(node) for node in nodes]
    required: set[str] = set()
    complete: list[int] = []  # first ranks of nodes with all files that a node holds once
    for place, text in enumerate(texts):
        if text is not None:
            required = set(manifest.from_json(text).files)
            if {name for name in required if not manifest.is_of_rank(name)} <= tables[place]:
                complete.append(place)
    if not complete or not required <= set().union(*tables):
        return None
    names = [
        table if first[place] in complete else set(filter(manifest.is_of_rank, table))
        for place, table in enumerate(tables)
    ]
    text = texts[first[rank] if first[rank] in complete else complete[0]]
    assert text is not None
    return names, manifest.from_json(text)


def _content(file: BinaryIO) -> torch.Tensor:
    """Return the bytes of an open file, and close it."""
    with file:
        return torch.from_numpy(np.fromfile(file, np.uint8))


def _receive(group: Group, path: Path, nbytes: int, source: int, tag: int) -> None:
    """Receive a file; a reader sees all of it or none.

    Raises:
        OSError: It cannot be written; it has been received.
    """
    content = torch.empty(nbytes, dtype=torch.uint8)
    group.recv(content, source, tag)
    partial = path.with_name(f"{path.name}.part")
    try:
        with naming(path):
            job_folder.require_room(path.parent, nbytes)
            partial.write_bytes(content.numpy().data)
        partial.replace(path)
    except OSError:
        # What there is of it takes memory that is short.
        partial.unlink(missing_ok=True)
        raise
