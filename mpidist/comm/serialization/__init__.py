"""tensor_table → frame: Python objects as bytes; pickled, or as data that names no code."""
