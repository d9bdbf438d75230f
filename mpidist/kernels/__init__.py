"""cuda/*.cu → load → launch → one module for each kernel.

Only this package imports CuPy; CPU tensors use each kernel's torch twin.
"""
