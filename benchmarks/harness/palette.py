"""Appearance of each implementation in all plots: label, colours, marker, line, hatch.

The colours are told apart by red-green-blind readers, too, and stand out from both papers; a
variant of an implementation has its colour, lighter or darker, and a hatch or a line of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Theme:
    """Colours of all that is not data."""

    # Between the stem and the suffix of a file's name.
    suffix: str
    # Background of the picture.
    paper: str
    # Text, axes and reference lines.
    ink: str
    grid: str
    # Background of panels that show predictions.
    shade: str


LIGHT = Theme("", "#ffffff", "#1a1a1a", "#dddddd", "#f3f0e6")
# The paper of the site's dark scheme.
DARK = Theme("-dark", "#1e2129", "#e8e8ea", "#3d424e", "#2b2f3a")
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class Style:
    """Appearance of one implementation, or of one line of another kind."""

    label: str
    # Colour on the light paper and on the dark one.
    light: str
    dark: str
    marker: str = "o"
    line: str = "-"
    hatch: str = ""
    # Share of paper that is mixed into the face of a bar.
    tint: float = 0.0

    def edge(self, theme: Theme) -> str:
        """Return the unmixed colour, of a bar's edge and hatch."""
        return self.light if theme is LIGHT else self.dark

    def color(self, theme: Theme) -> str:
        """Return the colour of a line, or of a bar's face."""
        return mixed(self.edge(theme), theme.paper, self.tint)


def mixed(color: str, other: str, share: float) -> str:
    """Return a colour with a share of another one, in sRGB values."""
    pairs = zip(_channels(color), _channels(other), strict=True)
    return "#" + "".join(f"{round((1 - share) * one + share * two):02x}" for one, two in pairs)


def _channels(color: str) -> list[int]:
    return [int(color[start : start + 2], 16) for start in (1, 3, 5)]


# --- implementations: one colour each, wherever they are plotted ---

OWN = Style("mpidist", "#1d55c8", "#3f86ff", "o")
TORCH_ON_MPIDIST = Style("torch on mpidist", "#2c97c1", "#35bcff", "s")
TORCH_ON_GLOO = Style("torch on Gloo", "#d45c11", "#d2502f", "^")
RAW_MPI = Style("mpi4py", "#6a6a6a", "#8a8788", "D")
FAIRSCALE = Style("FairScale on Gloo", "#c67680", "#cd2d70", "P")
# Code of torch's own that computes, on any backend.
TORCH = Style("torch", "#6c0b72", "#b06cb2", "v")
# The work alone, without communication or kernels: a limit, not an implementation.
BARE = Style("no communication", "#393637", "#eeeaec", "X")
NO_OP = Style("mpidist, noop_hook", "#389d8d", "#0c867e", "d")
ALONE = Style("one all-reduce alone", "#523b00", "#edd345", "p")
STAGED = Style("through the host", "#b5862e", "#a7810f", "^")

# Hooks of mpidist; the plain average is mpidist itself.
FP16 = Style("fp16_compress_hook", "#60a05f", "#9bf799", "s")
BF16 = Style("bf16_compress_hook", "#348c7d", "#5aa98d", "^")
INT8 = Style("quantization_pertensor_hook", "#f04040", "#f09060", "X")
POWERSGD_1 = Style("PowerSGD rank 1", "#cc8303", "#fed009", "D")
POWERSGD_2 = Style("PowerSGD rank 2", "#924e0b", "#cb8311", "v")
POWERSGD_4 = Style("PowerSGD rank 4", "#502603", "#986437", "P")


def named(style: Style, label: str) -> Style:
    """Return a style with another label."""
    return replace(style, label=label)


def bar_variant(style: Style, label: str, hatch: str = "///", tint: float = 0.55) -> Style:
    """Return a variant of a bar: as much lighter as the tint says, and hatched."""
    return replace(style, label=label, hatch=hatch, tint=tint)


def sharded(style: Style, label: str) -> Style:
    """Return the style of a hook whose optimizer is sharded: fainter, dashed, with a star."""
    return replace(style, label=label, marker="*", line="--", hatch="///", tint=0.4)


# --- contenders of the benchmarks, by their names in the records ---

_CALLS = {
    "gloo": TORCH_ON_GLOO,
    "mpi4py": named(RAW_MPI, "mpi4py alone"),
    "mpidist": TORCH_ON_MPIDIST,
    "native": named(OWN, "mpidist's own API"),
    "mpidist fp32": Style("torch on mpidist, fp32", "#155066", "#c9ecff", "*", "--"),
    "native fp32": Style("mpidist's own API, fp32", "#0a2054", "#8fa8d8", "<", "--"),
}
_STEPS = {
    "bare": BARE,
    "bare, zeroed": bar_variant(BARE, "no communication, zeroed", tint=0.2),
    "noop_hook": NO_OP,
    "noop_hook, zeroed": bar_variant(NO_OP, "mpidist, noop_hook, zeroed", tint=0.75),
    "mpidist": named(OWN, "mpidist's DDP"),
    "mpidist, zeroed": bar_variant(OWN, "mpidist's DDP, zeroed", tint=0.65),
    "torch on mpidist": named(TORCH_ON_MPIDIST, "torch's DDP on mpidist"),
    "torch on Gloo": named(TORCH_ON_GLOO, "torch's DDP on Gloo"),
    "noop_hook, copies": bar_variant(NO_OP, "mpidist, noop_hook, copies", "...", 0.45),
    "mpidist, copies": bar_variant(OWN, "mpidist's DDP, copies", "...", 0.35),
    "communication alone": ALONE,
    "to_owners": bar_variant(OWN, "to_owners", "...", 0.3),
    "to_owners, 1 buffer": bar_variant(OWN, "to_owners, 1 buffer", "///", 0.6),
    "allreduce_hook": named(OWN, "allreduce_hook"),
    "fp16_compress_hook": FP16,
    "bf16_compress_hook": BF16,
    "PowerSGD rank 1": POWERSGD_1,
    "PowerSGD rank 2": POWERSGD_2,
    "PowerSGD rank 4": POWERSGD_4,
    "quantization_pertensor_hook": INT8,
    "quantization_perchannel_hook": bar_variant(INT8, "quantization_perchannel_hook", tint=0.6),
    "torch's quantization_pertensor_hook": bar_variant(
        TORCH, "torch's quantization_pertensor_hook", tint=0.75
    ),
    "torch's PowerSGD rank 4": named(TORCH, "torch's PowerSGD rank 4"),
}
_ON_DEVICE = {
    "library": named(RAW_MPI, "MPI on device pointers"),
    "ring": named(OWN, "mpidist's ring"),
    "staged": STAGED,
}
_KERNELS = {
    "mpidist": named(OWN, "mpidist's kernel"),
    "torch": named(TORCH, "torch's calls"),
    "device copy": named(BARE, "device copy"),
    "kernels": bar_variant(OWN, "mpidist's kernels alone", tint=0.4),
    "powerSGD_hook": named(OWN, "mpidist's powerSGD_hook"),
    "torch's hook": named(TORCH, "torch's hook"),
    "torch's hook, batched": bar_variant(TORCH, "torch's hook, batched", tint=0.7),
}
_SHARDS = {
    "unsharded": named(BARE, "unsharded"),
    "FairScale on Gloo": FAIRSCALE,
    "torch on Gloo": named(TORCH_ON_GLOO, "torch's ZeRO on Gloo"),
    "torch on mpidist": named(TORCH_ON_MPIDIST, "torch's ZeRO on mpidist"),
    "mpidist": named(OWN, "mpidist's OSS"),
    "mpidist balanced": bar_variant(OWN, "mpidist's OSS, balanced", "...", 0.3),
    "mpidist flat": bar_variant(OWN, "mpidist's OSS, flat", "///", 0.5),
    "mpidist flat, one copy": bar_variant(OWN, "mpidist's OSS, flat, one copy", "xxx", 0.7),
    "mpidist, memory used again": bar_variant(OWN, "mpidist's OSS, memory used again", "...", 0.2),
    "mpidist, fresh memory": bar_variant(OWN, "mpidist's OSS, fresh memory", "///", 0.6),
}
_RPC = {
    "mpidist": OWN,
    "data only": Style("mpidist, data only", "#0a2054", "#8fa8d8", "<", "--"),
    "smart": Style("mpidist, SMART mode", "#2c97c1", "#35bcff", "s", "--"),
    "tensorpipe": named(TORCH, "torch on TensorPipe"),
    "floor": named(BARE, "floor in Python"),
    "ping-pong": named(RAW_MPI, "MPI's ping-pong"),
    "mpidist no-op": named(STAGED, "mpidist, no-op"),
    "mpidist, fewer": named(ALONE, "mpidist, fewer calls"),
}
_NODE_MEMORY = {
    "gloo": TORCH_ON_GLOO,
    "mpidist": TORCH_ON_MPIDIST,
    "node memory": Style("torch on mpidist, node memory", "#155066", "#c9ecff", "*", "--"),
}
_CONTENDERS = {
    "allocate": _NODE_MEMORY,
    "autograd": _RPC,
    "collectives": _CALLS,
    "messages": _CALLS,
    "device": _ON_DEVICE,
    "ddp": _STEPS,
    "owners": _STEPS,
    "powersgd": _STEPS,
    "kernels": _KERNELS,
    "oss": _SHARDS,
    "rpc": _RPC,
    "rpc-scale": _RPC,
}


def contender(benchmark: str, name: str) -> Style:
    """Return the style of a benchmark's contender; one that is not listed is black."""
    return _CONTENDERS.get(benchmark, {}).get(name, named(BARE, name))


# --- lines that are no implementations ---

# Told apart by marker and lightness, wherever more of them are drawn than colours differ.
SERIES = (
    Style("", "#1d55c8", "#3f86ff", "o"),
    Style("", "#cc8303", "#fed009", "s"),
    Style("", "#393637", "#eeeaec", "D"),
    Style("", "#2c97c1", "#35bcff", "^"),
    Style("", "#924e0b", "#cb8311", "v"),
    Style("", "#6c0b72", "#b06cb2", "P"),
    Style("", "#348c7d", "#5aa98d", "X"),
)
