"""Job that ``bench_startup.py`` times: one all-reduce over the backend that is the argument."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

if "RANK" not in os.environ and sys.argv[1] == "gloo":
    # What Gloo's users write in a job script.
    os.environ["RANK"] = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
dist.init_process_group(sys.argv[1])
x = torch.ones(2)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
dist.destroy_process_group()
