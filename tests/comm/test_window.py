"""Windows: puts, signals, mapped memory; refusals, deaths, threads, memory beside the window."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import warnings

import pytest
import torch

from mpidist.comm.window import WindowAccessType
from mpidist.errors import (
    CommTimeout,
    DisagreementError,
    GroupError,
    MpidistError,
)
from tests.tools.simulated_nodes import LAYOUTS, groups
from tests.tools.support import (
    agree,
    launcher,
    missing,
    printed,
    raises_on_all,
    require_tool,
    short_job,
)

MPI = pytest.mark.mpi(min_size=2)
SLOW = pytest.mark.slow
UNIFIED, SEPARATE = WindowAccessType.UNIFIED, WindowAccessType.SEPARATE
# How the ranks of a node reach each other's memory: they map it, or the tensor is a plain one.
KINDS = ("mapped", "messages")


@pytest.fixture
def on_nodes(world, monkeypatch):
    """Return a function that makes groups with simulated nodes."""
    with groups(world, monkeypatch) as clone:
        yield clone


def tensor_of(group, kind, size, dtype=torch.float32):
    """Return zeros that other ranks map, or others reach by messages."""
    if kind == "mapped":
        return group.allocate(size, dtype).zero_()
    return torch.zeros(size, dtype=dtype)


def ring(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


@MPI
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64", "uint8", "bool"])
def test_a_signal_follows_the_puts_before_it(group, kind, dtype):
    right, left = ring(group)
    dtype = getattr(torch, dtype)
    window = group.window(tensor_of(group, kind, (5, 20), dtype))
    wrong = []
    for turn, numel in enumerate((1, 7, 100)):
        values = (torch.arange(numel) % 5 + turn + 1).to(dtype)
        works = [window.put(values, right, (100 - numel) // 2, async_op=True)]
        works.append(window.signal(right, async_op=True))
        window.wait_signal(left)
        got = window.tensor.view(-1)[(100 - numel) // 2 :][:numel]
        if not torch.equal(got, values):
            wrong.append(numel)
        wrong += [numel for work in works if not work.wait()]
        # The neighbour has read it before the next put.
        window.signal(left)
        window.wait_signal(right)
    window.tensor_deregister()
    agree(group, not wrong, f"{wrong}")


@MPI
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_nodes_has_its_way(world, on_nodes, kind, layout):
    group = on_nodes(layout)
    nodes = group._comm.nodes
    window = group.window(tensor_of(group, kind, 300_000))
    peers = [rank for rank in range(group.size) if rank != group.rank]
    for peer in peers:
        # Complete when the call returns: the barrier shows it without a signal.
        window.put(torch.full((1000,), group.rank + 1.0), peer, 1000 * group.rank)
        window.put(torch.full((200_000,), 7.0), peer, 100_000)
    group.barrier()
    own = window.tensor
    ok = bool((own[100_000:] == 7).all())
    for rank in range(group.size):
        value = 0 if rank == group.rank else rank + 1
        ok = ok and bool((own[1000 * rank :][:1000] == value).all())
    facts = []
    for peer in peers:
        is_near = kind == "mapped" and nodes[peer] == nodes[group.rank]
        facts.append(window.get_attr(peer).access_type is (UNIFIED if is_near else SEPARATE))
        if is_near:
            mapped = window.map_remote_tensor(peer)
            facts.append(mapped.shape == own.shape)
            facts.append(bool((mapped[1000 * group.rank :][:1000] == group.rank + 1).all()))
        else:
            words = "another node" if nodes[peer] != nodes[group.rank] else "plain memory"
            with pytest.raises(MpidistError, match=words):
                window.map_remote_tensor(peer)
    facts.append(window.map_remote_tensor(group.rank) is own)
    window.tensor_deregister()
    agree(world, ok and all(facts), f"{facts}")


@MPI
def test_a_mapped_tensor_is_the_other_ranks_memory(group):
    """Changes of either rank are the other's, without a call in between but a barrier."""
    right, left = ring(group)
    window = group.window(size=(3, 4), dtype=torch.int32)
    there = window.map_remote_tensor(right)
    there.fill_(group.rank + 5)
    group.barrier()
    ok = bool((window.tensor == left + 5).all())
    group.barrier()
    window.tensor[1, 2] = 77
    group.barrier()
    ok = ok and there[1, 2].item() == 77 and there.shape == (3, 4)
    window.tensor_deregister()
    agree(group, ok)


@MPI
@pytest.mark.parametrize("kind", KINDS)
def test_views_are_written_in_the_order_of_their_elements(group, kind):
    right, left = ring(group)
    base = torch.arange(12).view(3, 4) * (1 + 2j)
    views = [base.t(), base.conj(), base[:, ::2], base.imag, torch._neg_view(base), base[1:2]]
    wrong = []
    for place, view in enumerate(views):
        values = view.contiguous().clone().resolve_neg().resolve_conj().reshape(-1)
        window = group.window(tensor_of(group, kind, 12, view.dtype))
        window.put(view, right)
        window.signal(right)
        window.wait_signal(left)
        if not torch.equal(window.tensor[: values.numel()], values):
            wrong.append(place)
        window.tensor_deregister()
    leaf = torch.ones(3, requires_grad=True)
    window = group.window(tensor_of(group, kind, 3))
    with torch.inference_mode():
        window.put(torch.ones(1), right, 2)
    window.put(leaf[:2] * 2, right, 0, async_op=True).wait()
    window.put(leaf[:1], right, 1)
    group.barrier()
    agree(group, not wrong and window.tensor.tolist() == [2.0, 1.0, 1.0], f"{wrong}")
    window.tensor_deregister()


@MPI
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused_and_nothing_is_written(group, kind):
    """The windows lie between canaries, and their sizes differ by rank."""
    right, _ = ring(group)
    whole = tensor_of(group, kind, 60 + group.size)
    whole.fill_(-1)
    own = whole[20 : 30 + group.rank]
    window = group.window(own)
    room = 10 + right
    wrong = []
    for error, arguments in (
        (ValueError, (torch.ones(room + 1), right, 0)),
        (ValueError, (torch.ones(2), right, room - 1)),
        (ValueError, (torch.ones(2), right, -1)),
        (ValueError, (torch.ones(0), right, room + 1)),
        (ValueError, (torch.ones(1), right, 1 << 62)),
        (ValueError, (torch.ones(1), right, 0.5)),
        (ValueError, (torch.ones(1), right, True)),
        (ValueError, (torch.ones(1), group.size, 0)),
        (ValueError, (torch.ones(1), -1, 0)),
        (TypeError, (torch.ones(1), None, 0)),
        (TypeError, (torch.ones(1, dtype=torch.float64), right, 0)),
        (TypeError, (torch.ones(1).to_sparse(), right, 0)),
        (TypeError, ([1.0], right, 0)),
        (ValueError, (torch.ones(1, device="meta"), right, 0)),
    ):
        try:
            window.put(*arguments)
            wrong.append(f"{arguments} was taken")
        except error as raised:
            if f"rank {group.rank} of {group.size}" not in str(raised):
                wrong.append(str(raised))
    for call in (window.signal, window.wait_signal, window.map_remote_tensor, window.get_attr):
        for rank in (-1, group.size, "0", True):
            with pytest.raises((ValueError, TypeError), match="rank"):
                call(rank)
    # All that fits is taken: the whole window, and its last element.
    window.put(torch.full((room,), 2.0), right)
    window.put(torch.full((1,), 3.0), right, room - 1)
    window.put(torch.ones(0), right, room)
    group.barrier()
    expected = torch.full_like(whole, -1)
    expected[20 : 30 + group.rank] = 2
    expected[29 + group.rank] = 3
    agree(group, not wrong and torch.equal(whole, expected), f"{wrong} {whole}")
    window.tensor_deregister()


@MPI
def test_a_wait_without_a_signal_ends_at_its_timeout(group):
    right, left = ring(group)
    for kind in KINDS:
        window = group.window(tensor_of(group, kind, 4))

        def wait(window=window):
            window.wait_signal(left, timeout=0.05)

        raises_on_all(group, CommTimeout, wait, "0.05")
        work = window.wait_signal(left, async_op=True)
        raises_on_all(group, CommTimeout, lambda work=work: work.wait(0.05), "wait_signal")
        # A handle that is dropped takes no signal.
        del work
        # The signal that comes later is kept for the next wait.
        window.signal(right)
        window.wait_signal(left)
        group.barrier()
        raises_on_all(group, CommTimeout, wait)
        window.tensor_deregister()
    short = group.clone()
    short.timeout_s = 0.1
    window = short.window(size=1)
    raises_on_all(group, CommTimeout, lambda: window.wait_signal(left), "0.1")
    short.close()


@MPI
@pytest.mark.parametrize("kind", KINDS)
def test_signals_are_counted_by_sender_and_lost_ones_are_named(group, kind):
    right, left = ring(group)
    window = group.window(tensor_of(group, kind, 4))
    for _ in range(3):
        window.signal(right)
        window.signal(group.rank)
    works = [window.wait_signal(left, async_op=True) for _ in range(2)]
    ok = all(work.wait() and work.is_completed() for work in works)
    window.wait_signal(group.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        window.tensor_deregister()
    told = [str(each.message) for each in caught if each.category is ResourceWarning]
    expected = {f"1 of rank {left}", f"2 of rank {group.rank}"}
    ok = ok and len(told) == 1 and all(words in told[0] for words in expected)
    # Those of the first registration are none of the second.
    window.tensor_register(tensor_of(group, kind, 4))
    window.signal(left)
    window.wait_signal(right)
    group.barrier()
    with pytest.raises(CommTimeout):
        window.wait_signal(left, timeout=0.05)
    window.tensor_deregister()
    agree(group, ok, f"{told}")


@MPI
def test_a_close_names_signals_without_a_waiter(group):
    right, left = ring(group)
    short = group.clone()
    for kind in KINDS:
        window = short.window(tensor_of(short, kind, 1))
        window.signal(right)
        # The signal of the other window is behind the first: its arrival is the first's, too. No
        # message of another kind, and no barrier, would say so.
        behind = short.window(tensor_of(short, kind, 1))
        behind.signal(right)
        behind.wait_signal(left)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        short.close()
    told = [str(each.message) for each in caught if each.category is ResourceWarning]
    agree(group, any(f"2 signals of rank {left}" in text for text in told), f"{told}")
    for call in (
        lambda: window.put(torch.ones(1), right),
        lambda: window.signal(right),
        lambda: window.wait_signal(left),
        lambda: window.map_remote_tensor(left),
        lambda: window.get_attr(left),
        window.tensor_deregister,
        lambda: window.tensor_register(torch.zeros(1)),
        short.window,
    ):
        raises_on_all(group, GroupError, call, "closed group")


@MPI
def test_ranks_that_disagree_all_get_an_error(group):
    last = group.rank == group.size - 1
    dtype = torch.float64 if last else torch.float32
    raises_on_all(group, DisagreementError, lambda: group.window(size=4, dtype=dtype), "float64")
    raises_on_all(group, DisagreementError, lambda: group.window(torch.zeros(4, dtype=dtype)))
    for kind, bad in (
        (ValueError, torch.zeros(4, 4).t()),
        (ValueError, torch.zeros(4, requires_grad=True)),
        (ValueError, torch.zeros(4, device="meta")),
        (TypeError, torch.zeros(4).to_sparse()),
        (TypeError, [1.0]),
    ):
        tensor = bad if last else torch.zeros(4)
        expected = kind if last else DisagreementError
        try:
            group.window(tensor)
            words = "it was taken"
        except expected as error:
            words = str(error)
        agree(group, "tensor" in words and "window" not in words[:5], words)
    # One rank has registered a tensor, the others have not.
    window = group.window(torch.zeros(2))
    other = window if last else group.window()
    with pytest.raises(GroupError if last else DisagreementError, match="is registered"):
        other.tensor_register(torch.zeros(2))
    if last:
        with pytest.raises(ValueError, match="not both"):
            group.window(torch.zeros(2), size=2)
    else:
        with pytest.raises(DisagreementError, match="not both"):
            group.window(size=2)
    window.put(torch.ones(2), 0)
    window.tensor_deregister()
    raises_on_all(group, GroupError, window.tensor_deregister, "needs a registered tensor")
    raises_on_all(group, GroupError, lambda: window.put(torch.ones(1), 0), "registered tensor")


@MPI
def test_wrong_sizes_and_dtypes_are_errors_on_all_ranks(world, monkeypatch):
    """Also in debug mode, in which a refusal of ``allocate`` alone is told to the other ranks."""
    for debug in ("0", "1"):
        monkeypatch.setenv("MPIDIST_DEBUG", debug)
        group = world.clone(f"debug {debug}")
        last = group.rank == group.size - 1
        for size, dtype, kind in (
            (-1, torch.float32, ValueError),
            ((2, -1), torch.float32, ValueError),
            ("x", torch.float32, TypeError),
            (1.5, torch.float32, TypeError),
            (3, "float32", TypeError),
        ):
            with pytest.raises(kind if last else DisagreementError, match=r"window|torch\.dtype"):
                group.window(size=size if last else 3, dtype=dtype if last else torch.float32)
        window = group.window(size=3)
        window.tensor_deregister()
        group.close()


@MPI
def test_a_rank_short_of_memory_is_written_by_messages(group, monkeypatch):
    """The others keep theirs; ranks may mix sizes and tensors, and differ in both."""
    last = group.size - 1
    right, left = ring(group)
    first = group.window(size=10)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if group.rank == last:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.warns(RuntimeWarning, match="No space left"):
                window = group.window(size=2_000_000)
        elif group.rank == 0:
            own = group.allocate((2, 1_000_000), torch.float32).zero_()
            window = group.window(own)
        else:
            window = group.window(size=2_000_000)
    facts = [window.get_attr(peer).access_type for peer in range(group.size)]
    expected = [
        SEPARATE if peer == last and peer != group.rank else UNIFIED for peer in range(group.size)
    ]
    wrong = [] if facts == expected else [facts]
    for turn in range(20):
        for each in (window, first):
            each.put(torch.full((10,), float(turn)), right, async_op=True)
            each.signal(right)
            each.wait_signal(left)
            if not bool((each.tensor.view(-1)[:10] == turn).all()):
                wrong.append(turn)
            each.signal(left)
            each.wait_signal(right)
    if group.rank != last:
        with pytest.raises(MpidistError, match="plain memory"):
            window.map_remote_tensor(last)
    window.tensor_deregister()
    first.tensor_deregister()
    agree(group, not wrong, f"{wrong}")


@MPI
def test_ranks_that_cannot_map_each_other_write_by_messages(group, monkeypatch):
    """As in containers of their own: rank 0 opens no other's file."""

    def refuse(*args, **kwargs):
        raise OSError("not here")

    right, left = ring(group)
    with monkeypatch.context() as patched:
        if group.rank == 0:
            patched.setattr(os, "open", refuse)
        plain = group.window(torch.zeros(8))  # makes the arenas, and asks for none of them
    with pytest.warns(RuntimeWarning, match="cannot map each other's memory"):
        window = group.window(size=8)
    facts = [window.get_attr(peer).access_type for peer in range(group.size)]
    expected = [UNIFIED if peer == group.rank else SEPARATE for peer in range(group.size)]
    window.put(torch.ones(8), right)
    window.signal(right)
    window.wait_signal(left)
    ok = bool((window.tensor == 1).all())
    window.tensor_deregister()
    plain.tensor_deregister()
    agree(group, ok and facts == expected, f"{facts}")


@MPI
def test_a_registered_tensor_keeps_its_range_and_gives_it_back(group):
    right, _ = ring(group)
    window = group.window(size=5000)
    address, there = window.tensor.data_ptr(), window.map_remote_tensor(right)
    gc.collect()
    other = group.allocate(5000, torch.float32).fill_(-1)
    apart = other.data_ptr() != address
    window.put(torch.ones(5000), right)
    group.barrier()
    ok = bool((window.tensor == 1).all()) and bool((other == -1).all()) and bool((there == 1).all())
    window.tensor_deregister()
    del window, there
    gc.collect()
    again = group.allocate(5000, torch.float32)
    agree(group, ok and apart and again.data_ptr() == address)


@MPI
def test_mapped_tensors_are_apart_in_autograd(group):
    """A store into one mapped tensor is none into what a graph has saved of another."""
    right, _ = ring(group)
    windows = [group.window(size=4), group.window(size=4)]
    saved, other = (window.map_remote_tensor(right) for window in windows)
    scale = torch.ones(4, requires_grad=True)
    result = (saved * scale).sum()
    other.fill_(3)
    result.backward()
    group.barrier()
    ok = bool((windows[1].tensor == 3).all()) and scale.grad is not None
    for window in windows:
        window.tensor_deregister()
    agree(group, ok)


@MPI
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_ends_after_the_puts_under_way(group, kind):
    """Threads put until the window refuses; all that it took is there, and nothing beside it."""
    right, left = ring(group)
    whole = tensor_of(group, kind, 40_200)
    whole.fill_(-1)
    window = group.window(whole[100:-100])
    taken, refused = [0, 0], []
    begun = threading.Barrier(3)

    def put_until_refused(lane):
        value = 0.0
        begun.wait()
        try:
            while True:
                value += 1
                window.put(torch.full((20_000,), value), right, 20_000 * lane, async_op=value % 2)
                taken[lane] = value
        except GroupError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=put_until_refused, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    group.barrier()
    window.tensor_deregister()
    for thread in threads:
        thread.join()
    every = group.all_gather_object(taken)
    ok = all("registered tensor" in text for text in refused) and len(refused) == 2
    for lane in range(2):
        part = whole[100 + 20_000 * lane :][:20_000]
        ok = ok and bool((part == (every[left][lane] or -1.0)).all())
    ok = ok and bool((whole[:100] == -1).all()) and bool((whole[-100:] == -1).all())
    agree(group, ok, f"{taken} {every} {refused} {whole[100]} {whole[20_100]}")


@MPI
def test_a_put_to_a_rank_that_has_given_up_its_window_is_an_error(group):
    """The last rank gives its window up alone, as after an error of its tensor_deregister."""
    last = group.size - 1
    whole = torch.full((12,), -1.0)
    window = group.window(whole[4:8])
    if group.rank == last:
        window._channel_of_group().remove(window._registered.exposed, False)
    group.barrier()
    words = "deregistered"
    if group.rank != last:
        with pytest.raises(MpidistError) as caught:
            window.put(torch.ones(4), last)
        words = str(caught.value)
        with pytest.raises(MpidistError):
            window.put(torch.ones(4), last, async_op=True).wait()
        # A dropped handle of such a put disturbs no later message.
        window.put(torch.ones(4), last, async_op=True)
        window.put(torch.ones(4), group.rank)
    agree(group, "deregistered" in words, words)
    ok = torch.equal(whole, torch.full((12,), -1.0)) if group.rank == last else True
    if group.rank != last:
        work = window.put(torch.ones(4), last, async_op=True)
        with pytest.raises(MpidistError, match="has deregistered"):
            window.tensor_deregister()
        assert work.is_completed() and "has deregistered" in str(work.exception())
    else:
        window.tensor_deregister()
    group.send(torch.ones(1), ring(group)[0])
    group.recv(torch.ones(1), ring(group)[1])
    agree(group, ok)


@MPI
@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_window(group, kind):
    """Each thread writes a part of its own, and has a window of its own to signal in."""
    right, left = ring(group)
    lanes, rounds = 3, 40
    data = group.window(tensor_of(group, kind, lanes * 50))
    bells = [group.window(tensor_of(group, kind, 1)) for _ in range(lanes)]
    wrong = []

    def run(lane):
        try:
            for turn in range(rounds):
                data.put(torch.full((50,), turn + lane / 4), right, 50 * lane, bool(turn % 2))
                bells[lane].signal(right)
                bells[lane].wait_signal(left)
                part = data.tensor[50 * lane :][:50]
                wrong.extend([(lane, turn)] * bool((part != turn + lane / 4).any()))
                bells[lane].signal(left)
                bells[lane].wait_signal(right)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for window in (*bells, data):
        window.tensor_deregister()
    agree(group, not wrong, f"{wrong[:5]}")


@MPI
def test_empty_tensors_and_many_windows(group):
    right, left = ring(group)
    empty = [group.window(size=0), group.window(torch.zeros(3, 0))]
    before = len(os.listdir("/proc/self/fd"))  # those of the node memory are open
    for window in empty:
        window.put(torch.zeros(0), right)
        window.signal(right)
        window.wait_signal(left)
        window.tensor_deregister()
    windows = [group.window(size=place + 1) for place in range(20)]
    for place, window in enumerate(windows):
        window.put(torch.full((1,), float(place)), right, place)
        window.signal(right)
    for place, window in reversed(list(enumerate(windows))):
        window.wait_signal(left)
        assert window.tensor[place] == place
        window.tensor_deregister()
    del windows, window, empty
    gc.collect()
    agree(group, len(os.listdir("/proc/self/fd")) <= before, "a file stayed open")


@MPI
def test_a_failed_group_refuses(group):
    right, _ = ring(group)
    short = group.clone()
    window = short.window(size=2)
    short.fail(MpidistError("it failed"))
    for call in (lambda: window.put(torch.ones(1), right), lambda: window.signal(right)):
        raises_on_all(group, MpidistError, call, "it failed")


def test_one_rank_alone_has_a_window():
    script = """
    import json, torch, mpidist.comm
    group = mpidist.comm.init()
    window = group.window(size=5)
    window.put(torch.ones(2), 0, 3)
    window.signal(0)
    window.wait_signal(0)
    print(json.dumps({"rank": 0, "got": window.tensor.tolist()}))
    window.tensor_deregister()
    group.close()
    """
    assert printed(short_job(1, script))[0]["got"] == [0, 0, 0, 1, 1]


_LOST = """
import contextlib, faulthandler, json, os, signal, sys, time, torch
import mpidist.comm
from mpidist.comm.mpi import exited_ranks
from mpidist.errors import MpidistError, RankFailureError
faulthandler.dump_traceback_later(60)  # where a job hangs
group = mpidist.comm.init()
windows = [group.window(size=100), group.window(torch.zeros(100))]
facts = {{"rank": group.rank, "errors": []}}
last = group.size - 1
if group.rank == last:
    for window in windows:
        window.signal(0)
    group.barrier()
    {end}
group.barrier()
# What a rank had sent before its end is still there.
if group.rank == 0:
    for window in windows:
        window.wait_signal(last)
for window in windows:
    for call in (
        lambda: window.wait_signal(last),
        lambda: window.put(torch.ones(100), last),
        lambda: window.put(torch.ones(100), last, async_op=True).wait(),
        lambda: window.signal(last),
    ):
        try:
            call()
            facts["errors"].append("none")
        except RankFailureError as error:
            facts["errors"].append(type(error).__name__ if error.ranks == (last,) else str(error))
    # The living go on.
    other = 1 - group.rank
    window.put(torch.full((100,), 3.0), other)
    window.signal(other)
    window.wait_signal(other)
    facts["errors"].append(window.tensor[0].item())
print(json.dumps(facts), flush=True)
if {dies}:
    time.sleep(0.5)
    os._exit(0)
"""


@SLOW
@pytest.mark.parametrize("end", ["it dies", "it ends"])
def test_a_rank_that_is_gone_is_an_error_of_its_peers(end):
    dies = end == "it dies"
    script = _LOST.format(
        end="os.kill(os.getpid(), signal.SIGKILL)" if dies else "sys.exit(0)", dies=dies
    )
    options = ("--with-ft", "ulfm") if dies else ()
    done = short_job(3, script, *options)
    found = printed(done)
    expected = 2 * [*4 * ["RankFailureError"], 3.0]
    assert [found[rank]["errors"] for rank in (0, 1)] == 2 * [expected], found


_FULL = """
import json, os, torch
import mpidist.comm
group = mpidist.comm.init()
group.barrier()
if group.rank == 0:
    with open("/dev/shm/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            pass
group.barrier()
free = os.statvfs("/dev/shm").f_bavail
other, ones = 1 - group.rank, torch.ones(3_000_000)
windows = [group.window(size=4_000_000), group.window(torch.zeros(4_000_000))]
for window in windows:
    window.put(ones, other, 1_000_000)
    window.signal(other)
    window.wait_signal(other)
sums = [window.tensor.sum().item() for window in windows]
for window in windows:
    window.tensor_deregister()
print(json.dumps({"rank": group.rank, "free": free, "sums": sums}), flush=True)
group.close()
"""


@SLOW
def test_a_full_dev_shm_is_no_obstacle():
    """In a mount namespace, whose /dev/shm the job fills when MPI has started."""
    unshare = require_tool("unshare")
    mount = 'mount -t tmpfs -o size=96m tmpfs /dev/shm && exec "$@"'
    inside = [unshare, "-m", "sh", "-c", mount, "sh"]
    if os.geteuid() != 0 or subprocess.run([*inside, "true"], check=False).returncode:
        missing("mount namespaces need root")
    found = printed(short_job(2, _FULL, command=[*inside, *launcher(2)]))
    assert [found[rank]["free"] for rank in (0, 1)] == [0, 0]
    assert [found[rank]["sums"] for rank in (0, 1)] == [[3e6, 3e6], [3e6, 3e6]]
