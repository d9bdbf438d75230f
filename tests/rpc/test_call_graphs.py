"""Random call graphs on all workers at once: exact values and errors; no leaks after a shutdown.

``MPIDIST_CALL_GRAPHS=30-60`` runs these seeds instead of the first few; ``30-30`` runs one seed.
"""

from __future__ import annotations

import os
import random
import threading

import pytest

import mpidist.rpc as rpc
from mpidist.rpc import api
from tests.rpc import call_graphs
from tests.rpc.limits import joined, left_behind, process_ends_after
from tests.tools.support import agree

_LIMIT_S = 60  # of one seed
_first, _last = os.environ.get("MPIDIST_CALL_GRAPHS", "0-3").split("-")
SEEDS = range(int(_first), int(_last) + 1)
LONG = range(100, 400)


def run(group, seed):
    """Run one seed's graphs: some in threads of their own, some not awaited before the shutdown."""
    rng = random.Random(1000 * seed + group.rank)
    options = rpc.RpcBackendOptions(num_worker_threads=rng.choice((1, 2, 4, 16)))
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    agent = api._get_current_rpc_agent()
    graphs = [
        [call_graphs.node(rng, group.size) for _ in range(6)] for _ in range(rng.randint(1, 3))
    ]

    def run_all(roots):
        for root in roots:
            call_graphs.judge(root)

    threads = [
        threading.Thread(target=run_all, args=(roots,), name=f"graphs{place}")
        for place, roots in enumerate(graphs)
    ]
    for thread in threads:
        thread.start()
    late = joined(threads, _LIMIT_S - 20)
    left = [call_graphs.node(rng, group.size, rng.randint(1, call_graphs.DEPTH)) for _ in range(8)]
    for place, root in enumerate(left):
        call = rpc.remote if place % 3 == 0 else rpc.rpc_async
        call(
            rng.randrange(group.size),
            call_graphs.judge,
            args=(root,),
            timeout=call_graphs.PATIENT_S,
        )
    rpc.shutdown(timeout=_LIMIT_S - 30)
    found = [*call_graphs.take_wrong(), *left_behind(agent), *late]
    agree(group, not found, f"MPIDIST_CALL_GRAPHS={seed}-{seed}: {found}")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.mpi(min_size=1)
def test_random_call_graphs(group, seed, request):
    with process_ends_after(_LIMIT_S, request.config):
        run(group, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.mpi(min_size=1)
def test_random_call_graphs_with_delayed_messages(group, seed, request):
    from tests.rpc import network

    with process_ends_after(_LIMIT_S, request.config), network.delayed(1000 * seed + group.rank):
        run(group, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG)
@pytest.mark.mpi(min_size=1)
def test_many_random_call_graphs(group, seed, request):
    with process_ends_after(_LIMIT_S, request.config):
        run(group, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG)
@pytest.mark.mpi(min_size=1)
def test_many_random_call_graphs_with_delayed_messages(group, seed, request):
    from tests.rpc import network

    with process_ends_after(_LIMIT_S, request.config), network.delayed(1000 * seed + group.rank):
        run(group, seed)


def drawn(seed, size=3):
    return call_graphs.node(random.Random(seed), size)


def test_a_seed_gives_one_graph():
    assert drawn(7) == drawn(7) and drawn(7) != drawn(8)


def test_every_kind_of_node_and_every_way_comes_up():
    nodes = [node for seed in range(300) for node in call_graphs.nodes_of(drawn(seed))]
    assert {type(node) for node in nodes} == set(call_graphs.KINDS)
    assert {node.way for node in nodes if isinstance(node, call_graphs.Race)} == {
        *call_graphs.WAYS,
        "fetch",
    }
    assert {node.to for node in nodes if isinstance(node, call_graphs.Call)} == {0, 1, 2}
    leaves = [
        node.expected()
        for node in nodes
        if isinstance(node, call_graphs.Leaf) and node.kind == "tensor"
    ]
    assert {leaf.nbytes > 32 << 10 for leaf in leaves} == {True, False}


def test_a_wrong_value_is_seen():
    leaf = call_graphs.Leaf("views", 9)
    call_graphs.judge(leaf)
    assert call_graphs.take_wrong() == []

    class Wrong(call_graphs.Leaf):
        def run(self):
            found = self.expected()
            found[1][-1] += 1
            return found

    for wrong in (Wrong("views", 9), call_graphs.Call("sync", 0, call_graphs.Leaf("plain", 1))):
        call_graphs.judge(wrong)  # the other: RPC is not initialised
        (line,) = call_graphs.take_wrong()
        assert str(wrong) in line
    assert not call_graphs.is_same([1, (2,)], [1, [2]]) and not call_graphs.is_same(1, True)
