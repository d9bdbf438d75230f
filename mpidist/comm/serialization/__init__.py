"""tensor_table → frame: Python objects as bytes and back, tensors beside them; pickled, or as data that names no code."""
