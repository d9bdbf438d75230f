"""Parameter shapes of well-known networks, in the order of their modules; no weights, no download.

Sources, which the tests compare with each list: ResNet-50 is torchvision's ``resnet50`` (He et al.,
arXiv 1512.03385; moving the stride to the 3 × 3 convolution changes no shape), 161 tensors, 25 557
032 parameters. BERT-large is ``bert-large-uncased`` without a head (Devlin et al., arXiv
1810.04805), 391 tensors, 335 141 888. GPT-2 is the smallest of four (Radford et al., 2019; the head
shares the embedding), 148 tensors, 124 439 808; GPT-2 XL is the largest, 580 tensors, 1 557 611
200.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """Yield convolutions without bias, with their normalizations, and one linear layer."""
    return [*_convolution(64, 3, 7), *_bottlenecks(), (1000, 2048), (1000,)]


def _bottlenecks() -> Iterator[Shape]:
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from (
                *_convolution(width, inside, 1),
                *_convolution(width, width, 3),
                *_convolution(4 * width, width, 1),
            )
            if block == 0:
                yield from _convolution(4 * width, inside, 1)  # of the shortcut
            inside = 4 * width


def _convolution(outside: int, inside: int, side: int) -> tuple[Shape, ...]:
    return (outside, inside, side, side), (outside,), (outside,)


def bert_large() -> list[Shape]:
    """24 layers of width 1024, 30 522 words, and the pooler."""
    width, wide = 1024, 4096
    norm = ((width,), (width,))
    attention = _linear(width, width) * 4
    layer = (*attention, *norm, *_linear(wide, width), *_linear(width, wide), *norm)
    return [(30522, width), (512, width), (2, width), *norm, *layer * 24, *_linear(width, width)]


def gpt2(layers: int = 12, width: int = 768) -> list[Shape]:
    """12 layers of width 768 and 50 257 words; weights of linear layers are transposed."""
    wide = 4 * width
    norm = ((width,), (width,))
    attention = ((width, 3 * width), (3 * width,), (width, width), (width,))
    mlp = ((width, wide), (wide,), (wide, width), (width,))
    return [(50257, width), (1024, width), *(*norm, *attention, *norm, *mlp) * layers, *norm]


def gpt2_xl() -> list[Shape]:
    """48 layers of width 1600."""
    return gpt2(48, 1600)


def _linear(outside: int, inside: int) -> tuple[Shape, ...]:
    return (outside, inside), (outside,)


LISTS = {"ResNet-50": resnet50, "BERT-large": bert_large, "GPT-2": gpt2}


def cut(shapes: Sequence[Shape], numel: int) -> list[Shape]:
    """Return ``numel`` elements of a list: the last tensor is cut; a short list repeats."""
    chosen: list[Shape] = []
    for shape in cycle(shapes):
        size = math.prod(shape)
        if size >= numel:
            return [*chosen, shape if size == numel else (numel,)]
        chosen.append(shape)
        numel -= size
    raise ValueError("an empty list has no beginning")
