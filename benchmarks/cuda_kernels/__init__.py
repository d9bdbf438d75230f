"""Kernels beside torch's own operators: cases, launches, goals, report."""
