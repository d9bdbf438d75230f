#!/bin/bash
# Conditions for MPI and CUDA on this machine: whether processes may share the GPU, whether MPI finds the driver's library.
#   tests/gpu/machine.sh PYTHON
exec 2>&1
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
exit 0
