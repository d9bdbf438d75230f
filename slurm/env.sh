# The site's values: the one file to edit. The job scripts of this folder source it.

# Modules that bring the cluster's MPI; empty where nothing is to be loaded.
MPIDIST_MODULES=""
# The Python environment with torch and mpidist; empty for the python on PATH.
MPIDIST_VENV=""
