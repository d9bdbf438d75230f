"""Actors and a learner for a bandit problem: actors send plays, the learner returns its policy.

mpirun -n 4 python examples/actor_learner.py
"""

from __future__ import annotations

import argparse
import threading

import torch
from command_line import parse, positive

import mpidist.comm
import mpidist.rpc as rpc

# Winning probability of each arm, unknown to the learner.
PAYS = torch.tensor([0.2, 0.5, 0.8, 0.3])


class Learner:
    """Policy-gradient learner of the arms' values, on worker 0."""

    def __init__(self, lr: float) -> None:
        self.logits = torch.zeros(len(PAYS), requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr)
        self._lock = threading.Lock()  # calls of several actors run concurrently

    def policy(self) -> torch.Tensor:
        return torch.softmax(self.logits.detach(), 0)

    def learn(self, arms: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        """Learn from plays; return the new policy."""
        with self._lock:
            chances = torch.log_softmax(self.logits, 0)[arms]
            loss = -((rewards - rewards.mean()) * chances).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return self.policy()


class Actor:
    """Player with the latest received policy, created on its worker by ``remote``."""

    def __init__(self, learner: rpc.RRef, seed: int) -> None:
        self.learner = learner
        self.generator = torch.Generator().manual_seed(seed)
        self.policy = learner.rpc_sync().policy()

    def play(self, rounds: int, plays: int) -> float:
        """Play and send the results to the learner; return the share of plays that won."""
        won = 0.0
        for _ in range(rounds):
            arms = torch.multinomial(self.policy, plays, replacement=True, generator=self.generator)
            rewards = (torch.rand(plays, generator=self.generator) < PAYS[arms]).float()
            self.policy = self.learner.rpc_sync().learn(arms, rewards)
            won += float(rewards.mean()) / rounds
        return won


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=100)
    rank, size = mpidist.comm.init().rank, mpidist.comm.init().size
    options = parse(parser, rank)
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        learner = rpc.RRef(Learner(lr=0.1))
        places = range(1, size) if size > 1 else range(1)
        actors = [rpc.remote(place, Actor, args=(learner, place)) for place in places]
        won = [
            call.wait()
            for call in [actor.rpc_async(timeout=0).play(options.rounds, 64) for actor in actors]
        ]
        policy = [round(chance, 2) for chance in learner.local_value().policy().tolist()]
        print(
            f"{len(actors)} actor(s) won {sum(won) / len(won):.2f} of their plays; policy {policy}"
        )
    rpc.shutdown()


if __name__ == "__main__":
    main()
