# The site's values: the one file to edit. The job scripts of this folder source it. Before sbatch, source it in the login shell,
# too: it sets what sbatch reads (account, partition, GPUs of a node). `mpidist submit` does that by itself.
# shellcheck shell=bash disable=SC2034

# The account that is charged, and the partition; empty for your default ones (`sacctmgr show assoc user=$USER`, `sinfo -s`).
MPIDIST_ACCOUNT=""
MPIDIST_PARTITION=""

# GPUs of a node, one for each rank; 0 for a partition without GPUs. Change --ntasks-per-node along with it.
MPIDIST_GPUS_PER_NODE="4"

# Modules that bring the cluster's MPI, in the order of loading; empty where nothing is to be loaded.
MPIDIST_MODULES=""
# The Python environment (venv, conda) with torch and mpidist; empty for the python on PATH.
MPIDIST_VENV=""

# The container image (.sif, see mpidist.def) that programs run in; empty for none. MPIDIST_VENV is then a path within it, empty for its python3.
MPIDIST_IMAGE=""
# Options of `apptainer exec`: --nv brings the host's GPU driver, --bind what the image does not see.
MPIDIST_IMAGE_OPTIONS="--nv"

# How ranks find each other: pmix, pmi2, cray_shasta (`srun --mpi=list` has those of this cluster), or mpirun, which starts them in
# the place of srun. auto: pmix for Open MPI (mpirun where Slurm lacks it), cray_shasta or pmi2 for MPICH and its relatives.
MPIDIST_MPI="auto"
# Intel MPI with pmi2 must be told where Slurm's library lies:
# export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so

# The folder for checkpoints, on a file system that all nodes see; a job's own lies in it, as JOBNAME-JOBID.
MPIDIST_CHECKPOINTS="checkpoints"
# So many times a job that has saved its state asks for another run.
MPIDIST_MAX_REQUEUES="20"

# The network. Most sites' modules set what is right; take a line where `mpidist doctor` or the log says that MPI goes another way.
# InfiniBand, Open MPI over UCX: which ports, and that nothing slower is taken instead.
# export UCX_NET_DEVICES=mlx5_0:1
# export OMPI_MCA_pml=ucx
# Slingshot, Cray MPICH: device memory (mpi4py must be linked with libmpi_gtl_cuda), and the cache of registered memory.
# export MPICH_GPU_SUPPORT_ENABLED=1
# export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_MR_CACHE_MONITOR=userfaultfd
# TCP: which interface; Open MPI's name for it, then libfabric's (MPICH).
# export OMPI_MCA_btl_tcp_if_include=eth0
# export FI_PROVIDER=tcp FI_TCP_IFACE=eth0

# What sbatch reads of the above; an option on its command line wins over these, these win over the #SBATCH lines.
if [[ $MPIDIST_ACCOUNT ]]; then export SBATCH_ACCOUNT="$MPIDIST_ACCOUNT"; fi
if [[ $MPIDIST_PARTITION ]]; then export SBATCH_PARTITION="$MPIDIST_PARTITION"; fi
export SBATCH_GPUS_PER_NODE="$MPIDIST_GPUS_PER_NODE"
# For messages that name this file.
MPIDIST_SITE=${BASH_SOURCE[0]}
