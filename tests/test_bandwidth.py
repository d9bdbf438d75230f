"""Bandwidths and message rates: by hand, and against the bytes that a ring algorithm sends."""

import importlib.util

import pytest

from tests.tools.support import ROOT, missing


@pytest.fixture
def bandwidth(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    if importlib.util.find_spec("rich") is None:
        missing("rich is not installed")
    from harness import bandwidth

    return bandwidth


def result(operation, size_bytes, **medians):
    contenders = {name: {"median_us": us} for name, us in medians.items()}
    return {"operation": operation, "size_bytes": size_bytes, "contenders": contenders}


def test_the_bus_carries_what_a_ring_sends(bandwidth):
    for ranks in (2, 3, 4, 8):
        block = 96 // ranks
        reduce_scatter = (ranks - 1) * block
        assert bandwidth.bus_bytes("all_reduce", 96, ranks) == 2 * reduce_scatter
        assert bandwidth.bus_bytes("reduce_scatter_tensor", block, ranks) == reduce_scatter
        assert bandwidth.bus_bytes("all_gather", block, ranks) == reduce_scatter
        assert bandwidth.bus_bytes("all_to_all_single", block, ranks) == reduce_scatter
        assert bandwidth.bus_bytes("broadcast", 96, ranks) == 96
    assert bandwidth.bus_bytes("barrier", 0, 4) is None
    assert bandwidth.bus_bytes("all_reduce", 96, 1) is None


def test_bandwidths_are_gigabytes_a_second(bandwidth):
    case = result("all_reduce", 4_000_000, gloo=4000.0, native=1000.0)
    assert bandwidth.bus_gbps(case, 2) == {"gloo": 1.0, "native": 4.0}
    text = bandwidth.bus_table([case], 2)
    assert "gloo" in text and "4" in text and "GB/s" in text
    assert bandwidth.bus_table([result("barrier", 0, gloo=3.0)], 2) == ""


def test_message_rates_are_of_all_pairs_and_directions(bandwidth):
    case = result("window", 1000, native=2.0)
    assert bandwidth.message_rates(case, 2) == {"native": (500.0, 0.5)}
    assert bandwidth.message_rates(case, 4) == {"native": (1000.0, 1.0)}
    both = result("window both ways", 1000, native=2.0)
    assert bandwidth.message_rates(both, 2) == {"native": (1000.0, 1.0)}
    assert "k/s" in bandwidth.rate_table([case], 2)
