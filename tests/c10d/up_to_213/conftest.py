"""Tests of groups without a Backend, which register kernels at import: not on torch 2.14."""

from mpidist.c10d import generation

collect_ignore_glob = ["test_*.py"] if generation.HAS_BACKENDS else []
