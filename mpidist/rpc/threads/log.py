"""Logger of RPC, which raises nothing: its records come from threads that serve all calls."""

from __future__ import annotations

import contextlib
import logging
import traceback
from typing import Any


class _Log(logging.LoggerAdapter):
    """Adapter that prints what a user's handler or filter raises, as ``logging`` itself does."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a record."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        try:
            super().log(level, msg, *args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException:
            with contextlib.suppress(Exception):  # standard error may be closed
                traceback.print_exc()


logger = _Log(logging.getLogger("mpidist.rpc"))
