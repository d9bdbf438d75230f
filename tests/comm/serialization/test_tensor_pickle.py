"""Pickles that refer to tensors by number: one number an object, attributes, threads."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import torch

from mpidist.comm.serialization import tensor_pickle
from mpidist.comm.serialization.tensor_pickle import Sink


def there(obj, objects=None):
    sink = Sink()
    pickled = tensor_pickle.dumps(obj, sink)
    return tensor_pickle.loads(pickled, sink.objects if objects is None else objects, sink.buffers)


def test_tensors_parameters_and_arrays_are_numbered_once():
    tensor, parameter, array = torch.ones(2), torch.nn.Parameter(torch.ones(1)), np.ones(3)
    sink = Sink()
    pickled = tensor_pickle.dumps([tensor, {"a": parameter}, array, tensor], sink)
    numbered = zip(sink.objects, [tensor, parameter, array], strict=True)
    assert all(one is other for one, other in numbered)
    others = [torch.zeros(2), torch.zeros(1), np.zeros(3)]
    found = tensor_pickle.loads(pickled, others, sink.buffers)
    assert found[0] is found[3] is others[0] and found[1]["a"] is others[1]
    assert found[2] is others[2]


def test_attributes_of_a_tensor_come_with_it():
    for made in (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))):
        made.label = ["a"]
        sink = Sink()
        pickled = tensor_pickle.dumps(made, sink)
        (plain,) = sink.objects
        assert not plain.__dict__ and plain.requires_grad and type(plain) is type(made)
        assert tensor_pickle.loads(pickled, [plain], []).label == ["a"] and made.label == ["a"]


def test_what_no_table_describes_is_in_the_pickle():
    strings = np.array(["a", "b"])
    sink = Sink()
    found = tensor_pickle.loads(tensor_pickle.dumps([strings, len, int], sink), [], sink.buffers)
    assert found[0].tolist() == ["a", "b"] and found[1:] == [len, int] and not sink.objects


def test_memory_of_other_objects_is_out_of_band():
    sink = Sink()
    pickled = tensor_pickle.dumps(pickle.PickleBuffer(bytearray(b"x" * 1000)), sink)
    assert len(pickled) < 100 and len(sink.buffers) == 1
    assert bytes(tensor_pickle.loads(pickled, [], [b"y" * 3])) == b"yyy"


class Reads:
    """An object whose unpickling reads another pickle."""

    def __reduce__(self):
        return there, (torch.ones(1),)


def test_each_thread_and_each_nested_pickle_has_its_own_objects():
    found = []
    tensor = torch.ones(3)

    def run(number):
        own = torch.full((1,), float(number))
        found.extend(there(own, [own]) is own for _ in range(50))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 150
    first, second = there([Reads(), tensor])
    assert first.tolist() == [1.0] and second is tensor
    assert tensor_pickle._current.objects == ()
