"""README's first program, as a newcomer runs it, on the torch that is installed."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch

from tests.tools.support import ROOT, printed, short_job

# What a reader's own training script goes on with.
_TRAINING = """
import json
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
total = sum(float(one.sum()) for one in model.parameters())
print(json.dumps({"rank": dist.get_rank(), "total": total, "torch": torch.__version__}))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_program_of_the_readme_trains(ranks):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert program is not None
    found = printed(short_job(ranks, textwrap.dedent(program[1]) + _TRAINING))
    assert len(found) == ranks and {one["torch"] for one in found.values()} == {torch.__version__}
    # Averaged gradients keep the replicas the same, from different inputs.
    assert len({one["total"] for one in found.values()}) == 1
