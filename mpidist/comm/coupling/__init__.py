"""Coupling: several programs in one job, and samples that one sends another."""
