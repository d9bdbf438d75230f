"""Tensor memory for MPI, on host and devices: stream → fence, device_request; buffer."""
