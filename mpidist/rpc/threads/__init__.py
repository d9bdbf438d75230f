"""Threads of an agent: ``polling`` → an action → its ``pool`` or a waiting ``call``."""
