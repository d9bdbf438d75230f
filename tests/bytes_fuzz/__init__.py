"""Readers of bytes that anybody may have written: strategies that write such bytes, and what must hold whatever they are."""
