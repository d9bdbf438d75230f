"""Program on torch's names of RPC, as PyTorch's examples of it are written; two or more ranks.

A parameter server with a model divided over ranks, a server that updates a batch of gradients at a
time, a pipeline, and a remote module. It prints what each part has come to.
"""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync


class ParameterServer(nn.Module):
    """A model on the server, and its parameters as references."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(self.net.weight)

    def forward(self, x):
        return self.net(x)

    def parameter_rrefs(self):
        return [RRef(parameter) for parameter in self.parameters()]


def call(method, rref, *args):
    return method(rref.local_value(), *args)


def remotely(method, rref, *args):
    return rpc_sync(rref.owner(), call, args=(method, rref, *args))


def train(server):
    ps = remote(server, ParameterServer)
    optimizer = DistributedOptimizer(
        optim.SGD, remotely(ParameterServer.parameter_rrefs, ps), lr=0.1
    )
    x = torch.eye(3)
    for _ in range(100):
        with dist_autograd.context() as context_id:
            loss = (remotely(ParameterServer.forward, ps, x) - 2).square().sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return loss.item()


class BatchServer:
    """A server that answers when all trainers have sent."""

    def __init__(self, trainers):
        self.lock = threading.Lock()
        self.trainers = trainers
        self.future = torch.futures.Future()
        self.total, self.count = 0.0, 0

    @staticmethod
    @rpc.functions.async_execution
    def update(rref, value):
        self = rref.local_value()
        with self.lock:
            self.total, self.count = self.total + value, self.count + 1
            if self.count == self.trainers:
                self.future.set_result(self.total)
            return self.future


def send(rref, value):
    return rpc.rpc_sync(rref.owner(), BatchServer.update, args=(rref, value))


class Stage(nn.Module):
    """A stage of a pipeline; it takes a reference and returns a tensor on the CPU."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x_rref):
        return x_rref.to_here() * self.factor


def pipeline(worker):
    first = rpc.remote("worker0", Stage, args=(2.0,))
    second = rpc.remote(worker, Stage, args=(3.0,))
    outputs = []
    for part in torch.arange(4.0).split(2):
        middle = first.remote().forward(RRef(part))
        outputs.append(second.rpc_async().forward(middle))
    return torch.cat(torch.futures.wait_all(outputs)).tolist()


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=60, init_method="tcp://localhost:29501"
    )
    rpc.init_rpc(
        f"worker{rank}",
        backend=rpc.BackendType.TENSORPIPE,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=options,
    )
    if rank == 0:
        assert isinstance(remote("worker1", len, args=("two",)), rpc.RRef)
        print(f"loss {train('worker1'):.6f}")
        server = RRef(BatchServer(world_size))
        others = range(world_size)
        futures = [rpc_async(f"worker{other}", send, args=(server, 1.5)) for other in others]
        print("batch", torch.futures.wait_all(futures))
        print("pipeline", pipeline("worker1"))
        module = RemoteModule("worker1/cpu", nn.Linear, args=(2, 1))
        print("module", list(module.forward(torch.ones(1, 2)).shape))
        print(type(rpc.api._get_current_rpc_agent()).__module__)
    rpc.shutdown()


if __name__ == "__main__":
    main()
