"""Groups for torch 2.11 to 2.13, whose ``Backend`` no Python class can be.

torch asks a group's Backend for capabilities, and its C++ finds collectives there. This folder has
the stand-in for that Backend, kernels and operators before torch's own, and replaced functions of
``torch.distributed``. It is deleted as a whole when 2.13 is no longer supported.
"""
