"""Entries and facts of made recordings."""

from mpidist.comm.recorder.recording import Entry, Kind


def entry(begin_ns, end_ns, kind=Kind.COLLECTIVE, operation="all_reduce", **fields):
    """Return an entry; a collective of group "world" unless ``fields`` say otherwise."""
    values = {
        "number": 1,
        "group": "world" if kind is Kind.COLLECTIVE else "",
        "sequence": 1 if kind is Kind.COLLECTIVE else 0,
        "dtype": "",
        "shape": (),
        "size_bytes": 0,
        "peer": -1,
        "tag": 0,
        "thread": 7,
        "failed": False,
    }
    return Entry(
        kind=kind, operation=operation, begin_ns=begin_ns, end_ns=end_ns, **{**values, **fields}
    )


def rank_facts(rank, **changed):
    """Return the facts of one rank of a trace."""
    facts = {
        "rank": rank,
        "host": f"node{rank // 2}",
        "pid": 100 + rank,
        "lost": 0,
        "groups": {"world": 0},
        "clock_error_us": 1.0,
        "clock_jumped": False,
        "wall": [[10**18, 0], [10**18 + 10**9, 10**9]],
    }
    return {**facts, **changed}


def facts(size, ranks=None, groups=None, **changed):
    """Return the facts of a trace, as ``otherData`` has them."""
    rows = [rank_facts(rank) for rank in range(size)] if ranks is None else ranks
    held = {
        "size": size,
        "trace": "t",
        "duration_us": 1e6,
        "ranks": rows,
        "groups": [["world1", list(range(size))]] if groups is None else groups,
        "tuning": [],
    }
    return {"mpidist": {**held, **changed}}
