# Values of the site: the only file to edit. The job scripts of this folder source it. Source it in
# the login shell before sbatch, too, because sbatch reads some values (account, partition, GPUs per
# node). `mpidist submit` does this automatically.
# shellcheck shell=bash disable=SC2034

# Account and partition; empty for the defaults (`sacctmgr show assoc user=$USER`, `sinfo -s`).
MPIDIST_ACCOUNT=""
MPIDIST_PARTITION=""

# GPUs per node, one per rank; 0 for a partition without GPUs. Change --ntasks-per-node accordingly.
MPIDIST_GPUS_PER_NODE="1"

# Modules with the cluster's MPI, in loading order; empty for none.
MPIDIST_MODULES=""
# Python environment (venv, conda) with torch and mpidist; empty for the python on PATH.
MPIDIST_VENV=""

# Container image (.sif, see mpidist.def) for the programs; empty for none. With an image,
# MPIDIST_VENV is a path within the image, or empty for its python3.
MPIDIST_IMAGE=""
# Options of `apptainer exec`: --nv for the host's GPU driver, --bind for folders outside the image.
MPIDIST_IMAGE_OPTIONS="--nv"

# Process management: pmix, pmi2 or cray_shasta (see `srun --mpi=list`), or mpirun instead of srun.
# auto: pmix or pmix_v* for Open MPI (mpirun if Slurm has neither), cray_shasta or pmi2 for MPICH
# and libraries of its ABI.
MPIDIST_MPI="auto"
# Intel MPI with pmi2 needs the path of Slurm's library:
# export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so

# Folder for checkpoints on a file system of all nodes; each job uses its subfolder JOBNAME-JOBID.
MPIDIST_CHECKPOINTS="checkpoints"
# Largest number of requeues of a job that saves its state.
MPIDIST_MAX_REQUEUES="20"
# Largest number of restarts of the ranks within the allocation after a failure, each only if a
# commit or checkpoint is newer than the last start; 0 for none.
MPIDIST_MAX_RESTARTS="0"
# Nodes that ranks use only in the place of lost ones (srun; sbatch --no-kill, and so many nodes
# more than needed).
MPIDIST_SPARE_NODES="0"

# Network. The modules of most sites set it; uncomment lines if `mpidist doctor` or the log shows
# the wrong network. InfiniBand, Open MPI over UCX: the ports, and no fallback to a slower network.
# export UCX_NET_DEVICES=mlx5_0:1
# export OMPI_MCA_pml=ucx
# Slingshot, Cray MPICH: device memory (link mpi4py with libmpi_gtl_cuda), registration cache.
# export MPICH_GPU_SUPPORT_ENABLED=1
# export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_MR_CACHE_MONITOR=userfaultfd
# TCP: the interface, for Open MPI and for libfabric (MPICH).
# export OMPI_MCA_btl_tcp_if_include=eth0
# export FI_PROVIDER=tcp FI_TCP_IFACE=eth0

# Values for sbatch: options on its command line override these, which override the #SBATCH lines.
if [[ $MPIDIST_ACCOUNT ]]; then export SBATCH_ACCOUNT="$MPIDIST_ACCOUNT"; fi
if [[ $MPIDIST_PARTITION ]]; then export SBATCH_PARTITION="$MPIDIST_PARTITION"; fi
export SBATCH_GPUS_PER_NODE="$MPIDIST_GPUS_PER_NODE"
# Name of this file in messages.
MPIDIST_SITE=${BASH_SOURCE[0]}
