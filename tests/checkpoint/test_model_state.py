"""State of the bare module: no prefixes, no memory of other tensors; differences of models."""

import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from mpidist.checkpoint import model_state
from tests.tools.transfers import CUDA, counted


class Wrapper(torch.nn.Module):
    """Substitute of the result of ``torch.compile``."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_the_bare_module_of_wrappers():
    net = torch.nn.Linear(2, 2)
    assert model_state.bare(Wrapper(Wrapper(net))) is net and model_state.bare(net) is net
    assert model_state.data_parallel(Wrapper(net)) is None and not model_state.keeps_own_buffers(
        net
    )


def test_a_view_of_larger_memory_takes_its_own_elements_alone():
    flat = torch.arange(1000.0)
    tied = flat[10:20]
    whole = torch.ones(3)
    made = model_state.packed(
        {"a": flat[:10].view(2, 5), "b": tied, "c": tied, "d": whole, "e": "text"}
    )
    assert made["d"].data_ptr() == whole.data_ptr() and made["e"] == "text"
    assert made["b"].data_ptr() == made["c"].data_ptr() and torch.equal(
        made["a"], flat[:10].view(2, 5)
    )
    file = io.BytesIO()
    torch.save(made, file)
    assert len(file.getvalue()) < 3000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("weight"), "missing: weight"),
        (lambda state: state.update(other=torch.ones(1)), "unexpected: other"),
        (
            lambda state: state.update(weight=torch.ones(3, 2)),
            r"of another shape: weight \(3, 2\) for \(2, 2\)",
        ),
        (lambda state: state.update({f"x{n}": 1 for n in range(9)}), "x5 and 3 more"),
    ],
)
def test_how_models_differ(change, words):
    net = torch.nn.Linear(2, 2)
    saved = dict(net.state_dict())
    model_state.require_fits(net, saved)
    change(saved)
    with pytest.raises(ValueError, match=words):
        model_state.require_fits(net, saved)


def test_a_state_that_is_no_dict_is_refused():
    with pytest.raises(ValueError, match="got list"):
        model_state.require_fits(torch.nn.Linear(1, 1), [])


def test_a_view_on_a_device_is_copied_once(monkeypatch):
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: id(tensor), raising=False)
    with counted() as counts:
        flat = torch.ones(20, device=CUDA)
        made = model_state.packed({"a": flat.narrow(0, 0, 5), "b": flat.as_strided((9,), (2,))})
        assert [value.device.type for value in made.values()] == ["cpu", "cpu"]
        assert counts.copies == counts.down == ["_to_copy", "_to_copy"]


def test_a_view_in_order_is_saved_from_its_own_memory():
    flat = torch.arange(96.0)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int8):
        held = flat.to(dtype)
        parts = {"a": held[8:32].view(2, 12), "b": held[:48].view(6, 8).t(), "c": held[5:5]}
        made = model_state.packed(parts)
        assert made["a"].data_ptr() == parts["a"].data_ptr()
        for name, value in made.items():
            assert value.dtype == dtype and torch.equal(value, parts[name])
            assert value.untyped_storage().nbytes() == value.nbytes
