"""Distributed PyTorch over the MPI that a cluster already has.

Importing it starts neither MPI nor CUDA.
"""

__version__ = "0.1.0"
