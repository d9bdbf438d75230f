"""Functions that tests of distributed autograd call on other workers."""

from __future__ import annotations

import torch

import mpidist.autograd as autograd
import mpidist.rpc as rpc


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def cube(x):
    return Cube.apply(x)


def cube_with_hook(other, x):
    made = cube(x)
    made.register_hook(lambda gradient: rpc.rpc_sync(other, torch.mul, args=(gradient, 3)))
    return made


def loss_of(x):
    return cube(x).sum()


def look_up(reference, places):
    return reference.local_value()(places)


def weight_gradient(context, reference):
    return autograd.get_gradients(context)[reference.local_value().weight]
