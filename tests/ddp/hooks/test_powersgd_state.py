"""PowerSGD's state: settings, what it keeps by parameter name, and what it loads."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from mpidist.ddp.hooks.powersgd_state import PowerSGDState


def bucket_of(*names, is_last=True):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in names]
    return SimpleNamespace(
        names=lambda: names, parameters=lambda: parameters, is_last=lambda: is_last
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"matrix_approximation_rank": 0}, "at least 1"),
        ({"start_powerSGD_iter": -1}, "start_powerSGD_iter must not be negative"),
        ({"min_compression_rate": -0.5}, "min_compression_rate must not be negative"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon must not be negative"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        PowerSGDState(None, **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"matrix_approximation_rank": 1.5},
            TypeError,
            "matrix_approximation_rank must be an int; got 1.5",
        ),
        (
            {"matrix_approximation_rank": True},
            TypeError,
            "matrix_approximation_rank must be an int",
        ),
        ({"matrix_approximation_rank": "2"}, TypeError, "matrix_approximation_rank must be an int"),
        ({"start_powerSGD_iter": 10.0}, TypeError, "start_powerSGD_iter must be an int"),
        ({"random_seed": None}, TypeError, "random_seed must be an int"),
        (
            {"compression_stats_logging_frequency": 0.5},
            TypeError,
            "compression_stats_logging_frequency must be an int",
        ),
        ({"min_compression_rate": "2"}, TypeError, "min_compression_rate must be a number"),
        ({"min_compression_rate": float("nan")}, ValueError, "min_compression_rate must be finite"),
        (
            {"orthogonalization_epsilon": float("inf")},
            ValueError,
            "orthogonalization_epsilon must be finite",
        ),
    ],
)
def test_options_of_another_type_are_refused_at_once(options, error, match):
    with pytest.raises(error, match=match):
        PowerSGDState(None, **options)


def test_a_bucket_keeps_what_it_has_made_for_one_key():
    state, made = PowerSGDState(), []

    def make():
        made.append(len(made))
        return made[-1]

    keys = ["a", "a", "b", "a"]
    assert [state.cached(0, key, make) for key in keys] == [0, 0, 1, 2]
    assert state.cached(1, "a", make) == 3 and state.cached(0, "a", make) == 2
    state.drop_cached(0), state.drop_cached(7)
    assert state.cached(0, "a", make) == 4 and state.cached(1, "a", make) == 3


def test_the_last_bucket_completes_the_step_and_logs_the_rate(caplog):
    caplog.set_level(logging.INFO, "mpidist")
    state = PowerSGDState(start_powerSGD_iter=1, compression_stats_logging_frequency=2)
    assert state.compression_stats() == (0.0, 0, 0)
    steps = []
    for is_last in (False, True, False, True):
        steps.append(state.count_step(bucket_of("a", is_last=is_last)))
        state.count_elements(30, 10)
    assert steps == [0, 0, 1, 1] and state.iter == 2
    assert state.compression_stats() == (3.0, 120, 40)
    begins, rate = (record.getMessage() for record in caplog.records)
    assert "compresses after 1 steps" in begins and "rate 3.0, 90 elements before, 30" in rate


def test_an_error_begins_at_zero_and_takes_its_gradients_form():
    state, gradient = PowerSGDState(), torch.ones(2, 3)
    error = state.error_of("a", gradient)
    assert not error.any() and state.error_of("a", gradient) is error
    error[0, 1] = 5.0
    other = state.error_of("a", torch.ones(3, 2, dtype=torch.float64).t())
    assert other.dtype == torch.float64 and other.stride() == (1, 2) and other[0, 1] == 5.0
    assert state.error_dict["a"] is other
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for 'a', whose gradient has \(6,\)"):
        state.error_of("a", torch.ones(6))


def test_a_factor_begins_at_the_last_one_or_at_random_values():
    state, q = PowerSGDState(random_seed=3), torch.empty(4, 2)

    def begun(name="a", step=0, of=state):
        of.initialize_q(name, q, step)
        return q.clone()

    first = begun()
    assert torch.equal(begun(), first)
    for other in (begun("b"), begun(step=1), begun(of=PowerSGDState(random_seed=4))):
        assert not torch.equal(other, first)
    state.q_memory_dict["a"] = torch.full((4, 2), 7.0)
    assert (begun() == 7.0).all()
    state.q_memory_dict["a"] = torch.full((4, 3), 7.0)  # of another rank
    assert torch.equal(begun(), first)
    state.q_memory_dict["a"] = torch.full((4, 2), 7.0)
    state.warm_start = False
    assert torch.equal(begun(), first)
    state.forget_q(["a", "never"])
    assert not state.q_memory_dict


def test_parameters_without_names_are_numbered_in_the_order_of_buckets():
    state, named, first, second = (
        PowerSGDState(), bucket_of("w", "b"), bucket_of("", ""), bucket_of("", "c")
    )  # fmt: skip
    assert state.names_of(named) == ("w", "b")
    assert state.names_of(first) == ("parameter 0", "parameter 1")
    assert state.names_of(second) == ("parameter 2", "parameter 3")
    assert state.names_of(first) == ("parameter 0", "parameter 1")


def test_a_state_of_anything_else_loads_nothing():
    state = PowerSGDState(matrix_approximation_rank=2)
    state.error_dict["a"] = torch.ones(2)
    saved = state.state_dict()
    assert "process_group" not in saved and saved["error_dict"] is state.error_dict
    fresh = PowerSGDState(process_group="mine")
    wrong = [
        {},
        {**saved, "more": 1},
        {**saved, "iter": -1},
        {**saved, "iter": 1.0},
        {**saved, "warm_start": 1},
        {**saved, "min_compression_rate": float("inf")},
        {**saved, "error_dict": {1: torch.ones(1)}},
        {**saved, "error_dict": {"a": torch.ones(1, dtype=torch.int32)}},
        {**saved, "q_memory_dict": [torch.ones(1)]},
    ]
    for given in wrong:
        with pytest.raises((TypeError, ValueError)):
            fresh.load_state_dict(given)
        assert fresh.matrix_approximation_rank == 1 and not fresh.error_dict
    fresh.cached(0, "key", lambda: 1)
    fresh.load_state_dict(saved)
    assert fresh.matrix_approximation_rank == 2 and fresh.process_group == "mine"
    assert fresh.cached(0, "key", lambda: 2) == 2
