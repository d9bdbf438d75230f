"""cuda/*.cu text → load → one module a kernel.

The only package that imports CuPy; CPU tensors take each kernel's torch twin.
"""
