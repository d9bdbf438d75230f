"""Functional optimizers by class, by key and by name."""

from __future__ import annotations

import pytest
import torch

import mpidist.optim as optim
from mpidist.optim import functional, registry


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_of_torchs_classes_that_torch_has_a_functional_form_of():
    from torch.distributed.optim.utils import functional_optim_map as of_torch

    assert set(of_torch) == set(optim.functional_optim_map)
    assert all(issubclass(ours, theirs) for theirs, ours in optim.functional_optim_map.items())


def test_ours_go_by_name_and_others_by_themselves():
    for ours in registry.functional_optim_map.values():
        assert isinstance(registry.name_or_class(ours), str)
        assert registry.resolve(registry.name_or_class(ours)) is ours

    class Adam(functional.Adam):
        """A user's of the same name."""

    assert registry.name_or_class(Adam) is Adam
    assert registry.resolve(Adam) is Adam
    with pytest.raises(ValueError, match="has no optimizer 'Lion'"):
        registry.resolve("Lion")


def test_what_is_registered_stays(monkeypatch):
    monkeypatch.setattr(registry, "functional_optim_map", dict(registry.functional_optim_map))
    registry.register_functional_optim("mine", functional.SGD)
    registry.register_functional_optim("mine", functional.Adam)
    registry.register_functional_optim(torch.optim.SGD, functional.Adam)
    assert registry.functional_optim_map["mine"] is functional.SGD
    assert registry.functional_optim_map[torch.optim.SGD] is functional.SGD


def test_the_package_says_what_it_lacks():
    with pytest.raises(AttributeError, match="no attribute 'Lion'"):
        _ = optim.Lion
