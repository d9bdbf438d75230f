"""Programs under test: the ranks of a job, divided in two."""

import mpidist.comm


def two(job, makers=1):
    """Return the coupling of ``makers`` processes that make samples, and the others, that take."""
    return mpidist.comm.couple({"make": makers, "take": job.size - makers}, comm=job, timeout_s=20)
