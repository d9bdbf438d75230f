"""Memory of samples."""

import torch

from mpidist.comm.coupling.messages import Form
from mpidist.comm.coupling.places import Places

FORM = Form(torch.float32, (4, 8))


def test_memory_is_used_again_when_no_tensor_is_left():
    places = Places()
    first = places.tensor(FORM)
    address = first.data_ptr()
    assert first.shape == (4, 8) and first.dtype is torch.float32
    view = first[1:].T
    del first
    other = places.tensor(FORM)
    assert other.data_ptr() != address  # the view is left
    del view
    again = places.tensor(Form(torch.int16, (64,)))  # as many bytes
    assert again.data_ptr() == address
    assert places.tensor(FORM).data_ptr() not in (address, other.data_ptr())


def test_a_graph_keeps_its_memory():
    places = Places()
    sample = places.tensor(FORM).fill_(2)
    weight = torch.ones(8, 1, requires_grad=True)
    loss = (sample @ weight).sum()  # keeps the sample for the backward pass
    del sample
    places.tensor(FORM).fill_(9)
    loss.backward()
    assert weight.grad.eq(8).all()


def test_tensors_without_elements_take_none():
    assert Places().tensor(Form(torch.bool, (3, 0))).shape == (3, 0)
