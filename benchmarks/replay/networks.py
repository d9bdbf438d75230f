"""Networks of many nodes as platform files of SimGrid: fat tree, dragonfly, one link. Pure.

All cables are full duplex and have the same rate and latency. A node has two cores, so that the
thread that communicates takes no time from the one that computes, and a loopback.

- **Fat tree** of two levels, routed by destination (D-mod-k): the leaf switches have as many cables
  to the spines as to nodes, divided by ``taper``.
- **Dragonfly**: groups of 32 nodes (16 routers with 2 nodes each, 2 cables between two routers; 32
  routers with a node each if there are more than 16 groups).
  SimGrid's routes are minimal, so that all traffic of two groups takes their own cables. A real one
  has few of them and spreads the load over other groups, which gives half of the nodes' rate to any
  pattern; so each two groups have 16 cables here, divided by ``taper``.
- **Pair**: two nodes and one cable, the two namespaces of ``slow_link.sh``.

Sources: Leiserson (1985) and Zahavi (2010) for fat trees; Kim, Dally, Scott and Abts (2008) for the
dragonfly.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("fat tree", "dragonfly", "pair")
# Operations per second of a node, so that a trace's computing is in nanoseconds.
FLOP_RATE = 1_000_000_000
_LOOPBACK = 'loopback_bw="100GBps" loopback_lat="100ns"'
# Of the dragonfly: nodes of a group, and its routers where there are not more groups than that.
GROUP, _ROUTERS = 32, 16


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        kind: One of ``KINDS``.
        nodes: A power of two; whole groups of ``GROUP`` for the dragonfly.
        rate_gbit_s: Of a cable.
        latency_s: Of a cable; a message passes two to six.
        taper: Ratio of the cables of nodes to those above them.
    """

    kind: str
    nodes: int
    rate_gbit_s: float
    latency_s: float
    taper: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no network {self.kind!r}; there are {', '.join(KINDS)}")
        if self.nodes < 2 or self.nodes & (self.nodes - 1):
            raise ValueError(f"a network has a power of two of nodes; got {self.nodes}")
        if not (self.rate_gbit_s > 0 and self.latency_s >= 0 and self.taper >= 1):
            raise ValueError("a network's rate and taper must be positive, its latency at least 0")
        if self.kind == "pair" and self.nodes != 2:
            raise ValueError(f"a pair has two nodes; got {self.nodes}")
        # Each router of a group has the cables to one other group: with more groups than routers
        # of a chassis SimGrid 3.32 ends by a segmentation fault, and a router has a node.
        most = GROUP * GROUP
        if self.kind == "dragonfly" and not 2 * GROUP <= self.nodes <= most:
            raise ValueError(f"a dragonfly has {2 * GROUP} to {most} nodes; got {self.nodes}")
        if self.kind == "fat tree" and self.nodes < 4:
            raise ValueError(f"a fat tree has at least 4 nodes; got {self.nodes}")


def hosts(network: Network) -> list[str]:
    """Return the names of the nodes, in the order of the ranks."""
    return [f"node-{rank}" for rank in range(network.nodes)]


def platform(network: Network) -> str:
    """Return the platform file."""
    inside = _pair(network) if network.kind == "pair" else _cluster(network)
    return (
        '<?xml version="1.0"?>\n'
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
        f'<platform version="4.1">\n{inside}</platform>\n'
    )


def _cluster(network: Network) -> str:
    if network.kind == "fat tree":
        leaf = 1 << ((network.nodes.bit_length() - 1) // 2)
        spines = max(leaf // network.taper, 1)
        topology, parameters = "FAT_TREE", f"2;{leaf},{network.nodes // leaf};1,{spines};1,1"
    else:
        bundle = max(GROUP // 2 // network.taper, 1)
        groups = network.nodes // GROUP
        routers = max(_ROUTERS, groups)
        topology, parameters = "DRAGONFLY", f"{groups},{bundle};1,1;{routers},2;{GROUP // routers}"
    return (
        f'<cluster id="network" prefix="node-" suffix="" radical="0-{network.nodes - 1}" core="2" '
        f'speed="{FLOP_RATE}f" {_cable(network, "bw", "lat")} {_LOOPBACK} '
        f'topology="{topology}" topo_parameters="{parameters}"/>\n'
    )


def _pair(network: Network) -> str:
    first, second = hosts(network)
    made = [f'<host id="{name}" speed="{FLOP_RATE}f" core="2"/>' for name in (first, second)]
    made += [
        f'<link id="cable" {_cable(network, "bandwidth", "latency")} '
        'sharing_policy="SPLITDUPLEX"/>',
        '<link id="memory" bandwidth="100GBps" latency="100ns" sharing_policy="FATPIPE"/>',
        f'<route src="{first}" dst="{second}"><link_ctn id="cable" direction="UP"/></route>',
    ]
    made += [
        f'<route src="{name}" dst="{name}"><link_ctn id="memory"/></route>'
        for name in (first, second)
    ]
    return '<zone id="pair" routing="Full">\n' + "\n".join(made) + "\n</zone>\n"


def _cable(network: Network, rate: str, latency: str) -> str:
    return f'{rate}="{network.rate_gbit_s:g}Gbps" {latency}="{network.latency_s * 1e9:g}ns"'
