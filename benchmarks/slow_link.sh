#!/bin/bash
# Run a command on two nodes that are joined by a slow link: two network namespaces, a veth pair limited by tc, MPICH over TCP.
#   benchmarks/slow_link.sh RATE MPIRUN COMMAND …        RATE as tc takes it: 1gbit, 100mbit
#   RANKS=2: ranks on each node (1); they share memory within a node, and ranks r and r + 2 are on one node.
# Needs root, iproute2 and an MPICH launcher (its ranks inherit the connection to it, so namespaces do not cut it off).
# Exit status 77, with the reason, where namespaces or tc are not to be had.
set -eu
rate=$1 mpirun=$2
shift 2

skip() { echo "slow_link.sh: skipped, $1" >&2; exit 77; }
command -v ip >/dev/null && command -v tc >/dev/null || skip "ip and tc (package iproute2) are not installed"
[ "$(id -u)" = 0 ] || skip "network namespaces need root"

first=mpidist-$$-a second=mpidist-$$-b
# Stale namespaces are found by the number of a process that is gone; only our own are removed.
remove() { ip netns del $first 2>/dev/null || true; ip netns del $second 2>/dev/null || true; }
trap remove EXIT
ip netns add $first 2>/dev/null || skip "network namespaces are not allowed here"
ip netns add $second
ip -n $first link add link0 type veth peer name link0 netns $second || skip "veth pairs are not allowed here"
number=1
for space in $first $second; do
    ip -n $space addr add 10.77.0.$number/24 dev link0
    ip -n $space link set lo up
    ip -n $space link set link0 up
    ip netns exec $space tc qdisc add dev link0 root tbf rate "$rate" burst 256kb latency 50ms || skip "tc is not allowed here"
    number=$((number + 1))
done
# The kernel reports a link as up a while after it is: until then MPICH finds no interface of this name.
for space in $first $second; do
    for _ in {1..100}; do
        ip -n $space -br link show link0 | grep -q ' UP ' && break
        sleep 0.05
    done
done

export MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp FI_TCP_IFACE=link0 GLOO_SOCKET_IFNAME=link0 MPIDIST_LINK="$rate"
ranks=${RANKS:-1}
if [ "$ranks" = 1 ]; then
    export MPIR_CVAR_NOLOCAL=1 # no shared memory between the ranks, or the link would carry nothing
else
    export MPIR_CVAR_NUM_CLIQUES=2 # MPICH takes every second rank to be on the same node
fi
job=()
for ((i = 0; i < ranks; i++)); do
    for space in $first $second; do job+=(: -n 1 ip netns exec $space "$@"); done
done
"$mpirun" "${job[@]:1}"
