# Common part of the job scripts: checks of the site's values, launcher of the MPI library,
# requeueing. Source after env.sh. Sets PYTHON, LAUNCHER, MPIDIST_EXAMPLES, MPIDIST_BENCHMARKS,
# MPIDIST_CHECKPOINT.
# shellcheck shell=bash

# Exit status of a rank that has saved its state and requests another run: EX_TEMPFAIL of
# sysexits.h, mpidist.checkpoint.REQUEUE_EXIT_CODE.
REQUEUE_STATUS=75
# Status of srun and mpirun after SIGUSR1 has ended a rank.
SIGNALLED_STATUS=138

say() { printf 'mpidist: %s\n' "$*"; }

die() {
    printf 'mpidist: %s\n' "$*" >&2
    exit 2
}

# Check that every value is present and valid.
check_values() {
    local name
    for name in ACCOUNT PARTITION GPUS_PER_NODE MODULES VENV IMAGE IMAGE_OPTIONS MPI CHECKPOINTS \
        MAX_REQUEUES MAX_RESTARTS SPARE_NODES; do
        name=MPIDIST_$name
        [[ -v $name ]] || die "edit $SITE: $name is missing (the shipped env.sh has all names)"
    done
    for name in MPIDIST_GPUS_PER_NODE MPIDIST_MAX_REQUEUES MPIDIST_MAX_RESTARTS \
        MPIDIST_SPARE_NODES; do
        [[ ${!name} =~ ^[0-9]+$ ]] || die "edit $SITE: $name must be a whole number, not '${!name}'"
        # bash takes 08 for an octal number.
        printf -v "$name" '%d' "$((10#${!name}))"
    done
    case $MPIDIST_MPI in
        auto | mpirun | pmix | pmix_v* | pmi2 | cray_shasta) ;;
        *) die "edit $SITE: MPIDIST_MPI must be auto, pmix, pmi2, cray_shasta or mpirun," \
            "not '$MPIDIST_MPI'" ;;
    esac
    if [[ $MPIDIST_PARTITION && $MPIDIST_PARTITION != "${SLURM_JOB_PARTITION:-}" ]]; then
        say "note: this job is in partition ${SLURM_JOB_PARTITION:-?}, and $SITE says" \
            "MPIDIST_PARTITION=$MPIDIST_PARTITION; source it before sbatch"
    fi
}

load_modules() {
    local file name
    [[ $MPIDIST_MODULES ]] || return 0
    # Module scripts use unset variables and failing commands; a batch shell may lack the function.
    set +u
    for file in "${MODULESHOME:-/usr/share/lmod/lmod}/init/bash" \
        /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
        # shellcheck disable=SC1090
        if ! type module &> /dev/null && [[ -r $file ]]; then source "$file" || :; fi
    done
    type module &> /dev/null || die "edit $SITE: MPIDIST_MODULES=\"$MPIDIST_MODULES\"," \
        "but this node has no command 'module'"
    for name in $MPIDIST_MODULES; do
        module load "$name" || die "edit $SITE: MPIDIST_MODULES: 'module load $name' failed;" \
            "'module avail' has the names"
    done
    set -u
}

# Set PYTHON, the interpreter, within the container if there is one; LIBRARY, the MPI library that
# PYTHON loads, without starting MPI; SRUN_TYPE, the `srun --mpi` type for LIBRARY among OFFERED, or
# "".
find_python() {
    local python=python3 runtime='' library
    if [[ $MPIDIST_IMAGE ]]; then
        [[ -e $MPIDIST_IMAGE ]] ||
            die "edit $SITE: MPIDIST_IMAGE: there is no $MPIDIST_IMAGE on $(hostname)"
        runtime=$(type -P apptainer || type -P singularity) ||
            die "edit $SITE: MPIDIST_IMAGE is set, but neither apptainer nor singularity is on" \
                "PATH; it may be one of MPIDIST_MODULES"
        read -ra PYTHON <<< "$runtime exec $MPIDIST_IMAGE_OPTIONS"
        PYTHON+=("$MPIDIST_IMAGE" "${MPIDIST_VENV:+$MPIDIST_VENV/bin/}python3")
    else
        if [[ $MPIDIST_VENV ]]; then
            [[ -x $MPIDIST_VENV/bin/python ]] ||
                die "edit $SITE: MPIDIST_VENV: there is no $MPIDIST_VENV/bin/python on $(hostname)"
            export PATH="$MPIDIST_VENV/bin:$PATH"
        fi
        python=$(type -P python || type -P python3) ||
            die "edit $SITE: MPIDIST_VENV is empty, and no python is on PATH"
        PYTHON=("$python")
    fi
    OFFERED=$(srun --mpi=list 2>&1) || die "srun --mpi=list failed: $OFFERED"
    library=$("${PYTHON[@]}" -c '
import sys
from mpidist import shipped
from mpidist.cli import srun_types
from mpidist.comm.discovery.installed import installed
library = installed()
print("cray" if "CRAY" in library.text.upper() else library.abi)
offered = srun_types.parse(sys.argv[1])
print(srun_types.choose(library.abi, f"{library.text} {library.file}", offered))
print(shipped.folder("examples"))
print(shipped.folder("benchmarks"))' "$OFFERED") ||
        die "edit $SITE: MPIDIST_VENV, MPIDIST_MODULES or MPIDIST_IMAGE:" \
            "'${PYTHON[*]}' cannot import mpidist or load MPI, as it says above"
    {
        read -r LIBRARY && read -r SRUN_TYPE && read -r MPIDIST_EXAMPLES &&
            read -r MPIDIST_BENCHMARKS
    } <<< "$library"
    export MPIDIST_EXAMPLES MPIDIST_BENCHMARKS
}

# Set LAUNCHER: srun with the --mpi of the library, or mpirun.
choose_launcher() {
    local mpi=$MPIDIST_MPI wait=60
    if [[ $mpi == auto ]]; then
        # Open MPI's mpirun gets the nodes from Slurm; MPICH's would need the cluster's srun.
        [[ $SRUN_TYPE || $LIBRARY == openmpi ]] ||
            die "edit $SITE: MPIDIST_MPI: Slurm offers no --mpi type for $LIBRARY: $OFFERED"
        mpi=${SRUN_TYPE:-mpirun}
    fi
    if [[ $mpi == mpirun ]]; then
        [[ -z $MPIDIST_IMAGE ]] || die "edit $SITE: MPIDIST_MPI=mpirun cannot start ranks in a" \
            "container; srun needs pmix or pmi2"
        LAUNCHER=("$(type -P mpirun)") ||
            die "edit $SITE: MPIDIST_MPI: no mpirun on PATH, and Slurm offers: $OFFERED"
    else
        grep -qw "$mpi" <<< "$OFFERED" ||
            die "edit $SITE: MPIDIST_MPI=$mpi is not among what Slurm offers: $OFFERED"
        # A rank may end while others save their state: --kill-on-bad-exit=0 lets them run, and
        # --wait gives them a minute. Ranks that wait for a killed one start again sooner.
        ((${MPIDIST_MAX_RESTARTS:-0} == 0)) || wait=10
        LAUNCHER=(srun --mpi="$mpi" --kill-on-bad-exit=0 --wait="$wait")
    fi
}

# One GPU for each rank, unless HAS_CPU_RANKS is set, and all GPUs of a node visible to each of its
# ranks, because ranks copy between devices.
check_gpus() {
    local gpus=${SLURM_GPUS_ON_NODE:-0} ranks=0 count
    [[ -z ${SLURM_GPUS_PER_TASK:-}${SLURM_GPU_BIND:-} ]] ||
        die "--gpus-per-task and --gpu-bind hide the GPUs of a node from its other ranks:" \
            "use --gpus-per-node and --ntasks-per-node alone"
    # Components of a heterogeneous job differ in their GPUs.
    ((MPIDIST_GPUS_PER_NODE > 0)) && [[ -z ${SLURM_HET_SIZE:-} ]] || return 0
    ((gpus > 0)) ||
        die "this job has no GPUs, and MPIDIST_GPUS_PER_NODE=$MPIDIST_GPUS_PER_NODE: submit with" \
            "--gpus-per-node=$MPIDIST_GPUS_PER_NODE, or edit $SITE: MPIDIST_GPUS_PER_NODE=0 for a" \
            "partition without them"
    [[ -z ${HAS_CPU_RANKS:-} ]] || return 0
    # "4(x2),3": the most on a node.
    for count in $(tr ',' ' ' <<< "${SLURM_TASKS_PER_NODE:-1}"); do
        count=${count%%(*}
        ((count > ranks)) && ranks=$count
    done
    ((ranks <= gpus)) || die "$ranks ranks and $gpus GPUs on a node:" \
        "make --ntasks-per-node and --gpus-per-node the same number"
    ((ranks == gpus)) ||
        say "note: $ranks ranks and $gpus GPUs on a node; as many GPUs as ranks are used"
}

# Try what MPI does with device memory, unless that is known from an earlier job: mpidist stages
# what was not tried. One rank on the first node, started as the job's ranks.
try_device_memory() {
    local one=(-n 1) said
    ((MPIDIST_GPUS_PER_NODE > 0)) && [[ -z ${SLURM_HET_SIZE:-} ]] || return 0
    # This node has a GPU: Nvidia's or AMD's.
    [[ -e /dev/nvidiactl || -e /dev/kfd ]] || return 0
    # With --gpus of the job, srun would ask one node for all of them.
    [[ ${LAUNCHER[0]} != srun ]] ||
        one=(--nodes=1 --ntasks=1 ${SLURM_GPUS_ON_NODE:+--gpus="$SLURM_GPUS_ON_NODE"})
    # A signal before the job's end must not end this shell; all nodes wait meanwhile.
    trap : USR1
    said=$(timeout 300 "${LAUNCHER[@]}" "${one[@]}" "${PYTHON[@]}" -m mpidist doctor \
        --no-launcher) ||
        say "note: 'mpidist doctor' has ended with status $?: what MPI does with device memory" \
            "may not have been tried. It printed: $said"
    trap - USR1
}

# Print the highest step of a commit or checkpoint that the ranks have noted; -1 for none.
saved_step() {
    local step=''
    [[ ! -r ${MPIDIST_PROGRESS:-} ]] || read -r step < "$MPIDIST_PROGRESS" || :
    [[ $step =~ ^[0-9]+$ ]] && printf '%d' "$((10#$step))" || printf '%s' -1
}

# Set ON_NODES, options of srun: as many nodes as without the spare ones, none of them lost.
choose_nodes() {
    local spare=${MPIDIST_SPARE_NODES:-0} nodes lost
    ON_NODES=()
    [[ $1 == srun ]] || return 0
    if ((spare > 0)); then
        nodes=$((SLURM_JOB_NUM_NODES - spare))
        ((nodes > 0)) || die "edit $SITE: MPIDIST_SPARE_NODES=$spare, and this job has" \
            "$SLURM_JOB_NUM_NODES nodes"
        ON_NODES+=(--nodes="$nodes" --ntasks="$((nodes * ${SLURM_NTASKS_PER_NODE:-1}))")
    fi
    if ((${MPIDIST_MAX_RESTARTS:-0} > 0)); then
        lost=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format=%N \
            --states=down,fail,drained,no_respond 2> /dev/null | sort -u | paste -sd, -) || lost=''
        [[ ! $lost ]] || ON_NODES+=(--exclude="$lost")
    fi
}

# Run the ranks and wait for them; after a failure start them again, at most MPIDIST_MAX_RESTARTS
# times, if they have saved since the last start. Requeue after status 75.
run_ranks() {
    local status starts=0 before now most=${MPIDIST_MAX_RESTARTS:-0}
    FORWARDED=
    while :; do
        before=$(saved_step)
        starts=$((starts + 1))
        choose_nodes "$@"
        run_once "$1" ${ON_NODES[@]+"${ON_NODES[@]}"} "${@:2}" && status=0 || status=$?
        if ((status == 0 || status == REQUEUE_STATUS || most == 0)); then break; fi
        # The time limit is near.
        if [[ $FORWARDED ]] || ((status == SIGNALLED_STATUS)); then break; fi
        now=$(saved_step)
        if ((now <= before)); then
            say "the ranks ended with status $status, and no commit or checkpoint is newer than" \
                "their last start: they are not started again"
            break
        fi
        if ((starts > most)); then
            say "the ranks ended with status $status after step $now; they were started $starts" \
                "times (MPIDIST_MAX_RESTARTS=$most of $SITE)"
            break
        fi
        say "the ranks ended with status $status after step $now: start $((starts + 1)) of at" \
            "most $((most + 1))"
    done
    if ((status == REQUEUE_STATUS)); then request_another_run; fi
    if ((status == SIGNALLED_STATUS)); then
        say "SIGUSR1 ended a rank: it came before the program had entered" \
            "mpidist.checkpoint.Preemption (a rank that still imports torch, for example), or the" \
            "program has none. This run saved nothing at the signal, and is not requeued. To go" \
            "on from an earlier checkpoint: MPIDIST_CHECKPOINT=$MPIDIST_CHECKPOINT sbatch …"
    fi
    return "$status"
}

# Run a command and wait for it. Forward a signal to this shell (--signal=B:…).
run_once() {
    local status signalled=yes ranks
    "$@" &
    ranks=$!
    # The ranks may have ended already, which is not an error.
    trap 'signalled=yes FORWARDED=yes; kill -USR1 "$ranks" || :' USR1
    # A signal ends the wait, but not the ranks.
    while [[ $signalled ]]; do
        signalled=
        wait "$ranks" && status=0 || status=$?
    done
    trap - USR1
    return "$status"
}

request_another_run() {
    local runs=${SLURM_RESTART_COUNT:-0}
    if ((runs >= MPIDIST_MAX_REQUEUES)); then
        say "state is saved; not requeued again after $runs times (MPIDIST_MAX_REQUEUES of" \
            "$SITE). To go on: MPIDIST_CHECKPOINT=$MPIDIST_CHECKPOINT sbatch …"
    else
        # Slurm kills this shell as it requeues the job: nothing that is said afterwards is sure to
        # reach the log.
        say "state is saved; to be requeued ($((runs + 1)) of at most $MPIDIST_MAX_REQUEUES" \
            "times). Slurm starts it again in two minutes at the earliest"
        scontrol requeue "$JOB" || say "Slurm refuses to requeue." \
            "To go on: MPIDIST_CHECKPOINT=$MPIDIST_CHECKPOINT sbatch …"
    fi
}

SITE=${MPIDIST_SITE:-$MPIDIST_SLURM/env.sh}
# Task of an array with its index: the number alone can mean the whole array.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}
check_values
check_gpus
load_modules
find_python
choose_launcher
# Since Slurm 22.05 srun does not inherit this option from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# One folder for all runs of this job; another job can name it explicitly.
export MPIDIST_CHECKPOINT=${MPIDIST_CHECKPOINT:-$MPIDIST_CHECKPOINTS/$SLURM_JOB_NAME-$JOB}
# The highest step that the ranks have saved, next to that folder.
if ((MPIDIST_MAX_RESTARTS > 0)); then
    mkdir -p "$(dirname "$MPIDIST_CHECKPOINT")"
    export MPIDIST_PROGRESS=${MPIDIST_PROGRESS:-$MPIDIST_CHECKPOINT.progress}
fi
# Write output at once, because the log is a file.
export PYTHONUNBUFFERED=1
say "job $JOB, run $((${SLURM_RESTART_COUNT:-0} + 1)), ${SLURM_JOB_NUM_NODES:-?} nodes from" \
    "$(hostname) on, GPUs of a node: ${SLURM_GPUS_ON_NODE:-0}, $LIBRARY by '${LAUNCHER[*]}'," \
    "checkpoints in $MPIDIST_CHECKPOINT"
try_device_memory
