"""Collectives and messages: cases with their checks, growth with numbers of tensors and calls."""
