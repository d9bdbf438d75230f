"""Defaults, with torch's names. Times are in seconds."""

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_INIT_METHOD = "mpi://"
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_SHUTDOWN_TIMEOUT = 0.0  # no timeout
UNSET_RPC_TIMEOUT = -1.0  # a call uses rpc_timeout of the options
