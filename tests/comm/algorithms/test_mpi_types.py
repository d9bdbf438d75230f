"""MPI datatypes of torch dtypes."""

from mpidist.comm.algorithms import mpi_types


def test_every_dtype_that_mpi_adds_has_mpis_size():
    for dtype, datatype in mpi_types.datatypes().items():
        assert datatype.Get_size() == dtype.itemsize, dtype
