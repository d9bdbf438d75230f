"""Exceptions of a signal's handler at random moments, as Ctrl-C or a time limit of the program."""

import contextlib
import random
import signal


class Interrupted(BaseException):
    """What the handler raises."""


class Interrupts:
    """Blocks that a handler leaves at a random moment.

    Args:
        seed: Of the moments.
        longest_s: The latest one.
    """

    def __init__(self, seed, longest_s=2e-3):
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self.count = 0

    def __enter__(self):
        self._before = signal.signal(signal.SIGALRM, self._handle)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _handle(self, *_):
        if self._is_armed:
            self._is_armed = False
            self.count += 1
            raise Interrupted

    def left(self, call):
        """Call a function of no arguments; return whether it was left, and its result.

        Python runs no handler between the return of such a function, and of one of Python that it
        returns the result of, and the storing of the result.
        """
        with contextlib.suppress(Interrupted):
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, self._longest_s))
            result = call()
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            return False, result
        return True, None
