"""Calls, references and distributed autograd: workers, cases, floors, goals."""
