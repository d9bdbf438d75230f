"""Scaling: jobs, measurements, model of costs, predictions, report."""
