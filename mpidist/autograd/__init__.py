"""Distributed autograd over RPC: the interface of ``torch.distributed.autograd``, with FAST and SMART mode.

The path: ``api`` → ``initiator`` → ``parts`` → ``local_pass`` (torch's engine, on a plan of
``dependencies``) → ``notices`` ⇝ the other workers' ``engine`` → their ``parts``.
"""

from mpidist.autograd.api import (
    _current_context as _current_context,
    _get_debug_info as _get_debug_info,
    _get_max_id as _get_max_id,
    _is_valid_context as _is_valid_context,
    _message_counts as _message_counts,
    _new_context as _new_context,
    _release_context as _release_context,
    _retrieve_context as _retrieve_context,
    backward,
    context,
    get_gradients,
)

__all__ = ["backward", "context", "get_gradients"]
