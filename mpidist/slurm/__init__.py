"""Jobs of Slurm: job_script → job_plan, against partition and job_shape → submission → job.

The scripts themselves are in the repository's folder ``slurm``. ``mpidist submit`` is the same plan
as ``submit`` here. An import of the package starts nothing, neither torch nor MPI.
"""

from __future__ import annotations

from mpidist.slurm.job import Job
from mpidist.slurm.submission import submit

__all__ = ["Job", "submit"]
