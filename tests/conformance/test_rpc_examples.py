"""PyTorch's examples of RPC on mpidist.rpc, in one job of at least 2 ranks."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore")]


def test_parameter_server(group):
    from tests.conformance import example_suite, suite

    suite.run_on_all(
        example_suite.ParameterServerSuite, "test_batch_updating_parameter_server", group
    )


def test_reinforcement_learning(group):
    from tests.conformance import example_suite, suite

    suite.run_on_all(example_suite.ReinforcementLearningSuite, "test_rl_rpc", group)
