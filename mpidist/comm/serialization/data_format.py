"""Layout of data-only objects: MessagePack, and the extension types that stand for what it lacks.

Nothing in it names code. None, bool, int of 64 bits, float, str, bytes, list and dict are
MessagePack's own; all else that is data is an extension type::

    OBJECT      u32: the number of a tensor, parameter, array or bytearray of the table beside (``tensor_format``)
    TUPLE, SET, FROZENSET   an array of the items
    PAIRS       an array of keys and values, in turn: a dict whose keys MessagePack cannot hold
    ORDERED     such an array of an OrderedDict, and its ``_metadata`` or None: what ``state_dict()`` returns
    INTEGER     two's complement, little-endian: an int past 64 bits
    COMPLEX     two f64
    TEXT        UTF-8 with surrogates: a str that UTF-8 does not encode
    ELLIPSIS    nothing
    SCALAR      an array of a dtype's name and the bytes of a numpy scalar
    DTYPE, DEVICE, SIZE     a torch.dtype's name; an array of type and index; an array of sizes

MessagePack's own timestamp is read as a ``datetime``; it is not written. Codes from ``FIRST_OWN``
on are the callers' own; each holds an array of values.

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
) = range(14)
FIRST_OWN, LAST_OWN = 32, 127

METADATA = "_metadata"  # torch's versions of modules, an attribute of a state dict
DEPTH = 100  # of extension types within each other

NUMBER = struct.Struct("<I")
TWO_FLOATS = struct.Struct("<dd")

# Python's own, which MessagePack holds as they are; a float is never an int there, whatever its
# value.
NATIVE = frozenset({type(None), bool, int, float, str, bytes})
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype is not None}
DTYPES_BY_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SCALAR_DTYPES: dict[str, np.dtype] = {
    dtype.name: dtype for dtype in ARRAY_DTYPES if dtype is not None
}
DEVICE_TYPES = frozenset({"cpu", "cuda", "meta"})
