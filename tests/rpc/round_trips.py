"""Round trips from encoder to decoder without MPI, and local stand-ins for remote references."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import torch

from mpidist.rpc.values import codec, pickles

READER = codec.Decoder(None)


class Marked(pickles.Reference):
    """A reference that is identified by a number."""

    def __init__(self, number):
        self.number = number

    def fork(self, to):
        return self.number, 100 + self.number, to


def memory_of(part):
    """Return a part as the transport delivers it: in memory of its own."""
    is_tensor = isinstance(part, torch.Tensor)
    data = part.detach().view(-1).view(torch.uint8).numpy().tobytes() if is_tensor else bytes(part)
    return memoryview(bytearray(data))


def decoded(content, offset=0, reader=READER, **options):
    """Decode a content; ``offset`` bytes precede it, as a header would."""
    flags, body, parts, _ = content.body(None)
    if not body:
        return None
    references = [Marked(reference.number) for reference in content.references]
    there = [memory_of(part) for part in parts]
    return reader.decode(flags, bytearray(offset) + body, offset, there, references, **options)


def encode_call(args, kwargs, data_only=None):
    """Encode the arguments of a function that has a name."""
    return codec.encode_function(encode_call, b"a name", args, kwargs, data_only)


def over(obj, **options):
    """Return an object that has been encoded and decoded."""
    return decoded(codec.encode(obj), **options)


def described(obj):
    """Return a hashable description, equal only for objects of equal types and values."""
    kind = type(obj)
    if kind is float:
        return kind, struct.pack("<d", obj)
    if kind is complex:
        return kind, struct.pack("<dd", obj.real, obj.imag)
    if kind in (tuple, list):
        return kind, tuple(map(described, obj))
    if kind is dict:
        return kind, tuple((described(key), described(value)) for key, value in obj.items())
    if kind in (set, frozenset):
        return kind, frozenset(Counter(map(described, obj)).items())
    if kind in (torch.Tensor, torch.nn.Parameter):
        data = obj.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return kind, obj.dtype, obj.shape, data, obj.requires_grad
    if kind is np.ndarray:
        return kind, obj.dtype, obj.shape, obj.tobytes()
    if kind is bytearray:
        return kind, bytes(obj)
    if kind is Marked:
        return kind, obj.number
    return kind, obj
