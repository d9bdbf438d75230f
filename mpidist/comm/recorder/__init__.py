"""Recorder: the last operations of this process, in memory that outlives it."""
