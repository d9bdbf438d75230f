"""Methods of a mixed group: ours or torch's by the device of the first tensor; pure."""

import torch

from mpidist.c10d.routing import device_of, route


class Base:
    def broadcast(self, tensors, root=0):
        """Send from one rank."""
        return "ours", root


class Mixed(Base):
    def _is_ours(self, device):
        return device == "cpu"

    def _torch_group(self):
        class Other:
            def broadcast(self, tensors, root=0):
                return "torch's", root

        return Other()


route(Mixed, Base, ["broadcast"])


def test_the_first_tensor_chooses_the_group():
    host, other = torch.ones(1), torch.ones(1, device="meta")
    assert Mixed().broadcast([host, other], root=2) == ("ours", 2)
    assert Mixed().broadcast([[other], host], 3) == ("torch's", 3)
    assert Mixed().broadcast(tensors=[other]) == ("torch's", 0)
    assert Mixed().broadcast([]) == ("ours", 0)
    assert Mixed.broadcast.__doc__ == Base.broadcast.__doc__


def test_the_device_is_that_of_the_first_tensor_in_any_depth():
    other = torch.ones(1, device="meta")
    assert device_of([1, [(), ["x", (other,)]], torch.ones(1)]) == "meta"
    assert device_of([1, "x", [[]]]) is None
