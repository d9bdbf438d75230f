"""Distributed autograd over RPC: ``torch.distributed.autograd``'s interface, FAST and SMART mode.

The path: ``api`` → ``initiator`` → ``start`` → ``parts`` → ``local_pass`` (torch's engine, on a
plan of ``dependencies``) → ``control_messages`` ⇝ the other workers' ``engine`` → their ``parts``.
"""

from mpidist.autograd.api import (  # noqa: F401
    _current_context,
    _get_debug_info,
    _get_max_id,
    _is_valid_context,
    _message_counts,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    context,
    get_gradients,
)

__all__ = ["backward", "context", "get_gradients"]
