"""Train with a parameter server that averages the trainers' gradients and returns new weights.

mpirun -n 4 python examples/parameter_server.py
"""

from __future__ import annotations

import argparse
import threading

import torch
from command_line import parse, positive
from torch import nn

import mpidist.comm
import mpidist.rpc as rpc

TARGET = torch.tensor([[1.0, -2.0, 0.5, 3.0]])


class ParameterServer:
    """Server of the model, on worker 0; trainers call it through a reference."""

    def __init__(self, trainers: int, lr: float) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)
        self._trainers = trainers
        self._lock = threading.Lock()
        self._arrived = 0
        self._next: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    @rpc.functions.async_execution
    def step(self, gradients: list[torch.Tensor]) -> torch.futures.Future:
        """Add a trainer's gradients; the future completes after all trainers have called.

        No thread waits.
        """
        with self._lock:
            answer = self._next
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                part = gradient / self._trainers
                parameter.grad = part if parameter.grad is None else parameter.grad + part
            self._arrived += 1
            if self._arrived == self._trainers:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self._arrived, self._next = 0, torch.futures.Future()
                answer.set_result([weight.clone() for weight in self.weights()])
        return answer


def train(server: rpc.RRef, steps: int, seed: int) -> float:
    """Run on each trainer; return the last loss."""
    generator = torch.Generator().manual_seed(seed)
    model, loss = nn.Linear(4, 1), torch.zeros(())
    weights = server.rpc_sync().weights()
    for _ in range(steps):
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        inputs = torch.randn(32, 4, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs @ TARGET.T)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        weights = server.rpc_sync().step(list(gradients))
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=200)
    rank, size = mpidist.comm.init().rank, mpidist.comm.init().size
    options = parse(parser, rank)
    torch.manual_seed(0)
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}")
    if rank == 0:
        server = rpc.RRef(ParameterServer(max(size - 1, 1), lr=0.1))
        trainers = range(1, size) if size > 1 else range(1)
        calls = [
            rpc.rpc_async(trainer, train, args=(server, options.steps, trainer))
            for trainer in trainers
        ]
        losses = [call.wait() for call in calls]
        weights = server.local_value().weights()[0]
        print(
            f"{len(losses)} trainer(s), {options.steps} steps: loss {max(losses):.2e}, weights "
            f"{weights}"
        )
    rpc.shutdown()


if __name__ == "__main__":
    main()
