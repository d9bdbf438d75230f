"""State and settings from messages, checked before an optimizer loads them."""

from __future__ import annotations

import pytest
import torch

from mpidist.optim.loaded_state import SWITCHES, checked, require_switches


@pytest.mark.parametrize("name", SWITCHES)
def test_kernels_are_switched_on_by_no_message(name):
    for value, present in [
        (True, None),
        (True, False),
        (1, True),
        ("on", None),
        (torch.ones(1), True),
        (True, 1),
        (2, True),
    ]:
        with pytest.raises(
            ValueError, match=f"'{name}' is switched on where the optimizer is made"
        ):
            require_switches({"lr": 1.0, name: value}, {name: present})
    with pytest.raises(ValueError, match=name):
        require_switches({name: True}, {})
    for value, present in [
        (True, True),
        (False, True),
        (None, True),
        (False, None),
        (None, None),
        (1, 1),
    ]:
        require_switches({name: value}, {name: present})
    require_switches({"lr": 1.0}, {name: True})


def test_tensors_get_memory_of_their_own_with_their_parameters_strides():
    parameter, rows = torch.zeros(3, 4).t(), torch.arange(36.0).view(3, 4, 3)
    state = {
        0: {
            "exp_avg": rows[1],
            "history": [rows[2], (rows[0, 0],)],
            "by": {"name": rows[0]},
            "step": torch.tensor(2.0),
            "n": 3,
        }
    }
    found = checked(state, [parameter], [True], {})[0]
    assert found["exp_avg"].stride() == (1, 4) and torch.equal(found["exp_avg"], rows[1])
    assert torch.equal(found["history"][0], rows[2]) and torch.equal(
        found["history"][1][0], rows[0, 0]
    )
    assert (found["n"], found["step"].item()) == (3, 2.0)
    before = found["exp_avg"].clone(), found["history"][1][0].clone(), found["by"]["name"].clone()
    rows.fill_(-1)
    assert all(
        map(torch.equal, before, (found["exp_avg"], found["history"][1][0], found["by"]["name"]))
    )


def test_an_expanded_tensor_is_written_out():
    size = 1000
    last = torch.arange(float(size)).as_strided((size,), (0,), size - 1)
    found = checked({0: {"exp_avg": last}}, [torch.zeros(size)], [True], {})[0]["exp_avg"]
    assert (found.stride(), found.storage_offset(), found.untyped_storage().nbytes()) == (
        (1,),
        0,
        4 * size,
    )
    assert found.eq(size - 1).all()


def test_shapes_are_those_of_the_parameter_or_of_the_present_state():
    parameters, wrong = [torch.zeros(5), torch.zeros(5)], {1: {"row": torch.zeros(1)}}
    assert checked(wrong, parameters, [True, False], {})[1]["row"].shape == (1,)
    with pytest.raises(ValueError, match="'row' of shape"):
        checked(wrong, parameters, [False, True], {})
    checked(wrong, parameters, [False, True], {1: {"row": torch.ones(1)}})


def test_few_bytes_do_not_become_many():
    one = torch.ones(1).expand(1 << 40)
    with pytest.raises(ValueError, match="share their memory"):
        checked({0: {"history": one}}, [torch.zeros(5)], [False], {})
    part = torch.ones(1 << 10)
    with pytest.raises(ValueError, match="share their memory"):
        checked({0: {"history": [part] * 100}}, [torch.zeros(5)], [False], {})
    sparse = checked({0: {"history": part.to_sparse()}}, [torch.zeros(5)], [False], {})
    assert sparse[0]["history"].is_sparse
