"""Layout of data-only objects: MessagePack, and extension types for what MessagePack lacks.

Nothing in the format names code. None, bool, int of 64 bits, float, str, bytes, list and dict are
MessagePack's own types; all other data is an extension type::

    OBJECT      u32: the number of a tensor, parameter, array or bytearray in the tensor table
    OBJECTS     u32, u32: a list of objects with consecutive numbers, by the first and the count
    TUPLES      an array of arrays: a list of tuples of MessagePack's own types
    TUPLE, SET, FROZENSET   an array of the items
    PAIRS       an array of alternating keys and values: a dict whose keys MessagePack lacks
    ORDERED     such an array of an OrderedDict, and its ``_metadata`` or None (state dicts)
    INTEGER     two's complement, little-endian: an int beyond 64 bits
    COMPLEX     two f64
    TEXT        UTF-8 with surrogates: a str that UTF-8 cannot encode
    ELLIPSIS    nothing
    SCALAR      an array of a dtype's name and the bytes of a numpy scalar
    DTYPE, DEVICE, SIZE     a torch.dtype's name; an array of type and index; an array of sizes

MessagePack's timestamp is read as a ``datetime`` and never written. Codes from ``FIRST_OWN`` on are
defined by callers.

Source: the MessagePack specification, github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from mpidist.comm.serialization.tensor_format import ARRAY_DTYPES, DTYPES

(
    OBJECT,
    TUPLE,
    SET,
    FROZENSET,
    PAIRS,
    INTEGER,
    COMPLEX,
    TEXT,
    ELLIPSIS,
    SCALAR,
    DTYPE,
    DEVICE,
    SIZE,
    ORDERED,
    OBJECTS,
    TUPLES,
) = range(16)
FIRST_OWN, LAST_OWN = 32, 127

METADATA = "_metadata"  # versions of modules, an attribute of a state dict
DEPTH = 100  # of nested extension types

NUMBER = struct.Struct("<I")
RANGE = struct.Struct("<II")
TWO_FLOATS = struct.Struct("<dd")

# Types that MessagePack holds unchanged; a float is always written as a float.
NATIVE = frozenset({type(None), bool, int, float, str, bytes})
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype is not None}
DTYPES_BY_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SCALAR_DTYPES: dict[str, np.dtype] = {
    dtype.name: dtype for dtype in ARRAY_DTYPES if dtype is not None
}
DEVICE_TYPES = frozenset({"cpu", "cuda", "meta"})
