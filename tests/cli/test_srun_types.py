"""Types of ``srun --mpi``: parsing of Slurm's list, and the choice for each MPI library; pure."""

from mpidist.cli.srun_types import choose, parse

OPEN = "Open MPI v5.0.11, package: x /m/lib/libmpi.so.40"
MPICH = "MPICH Version: 5.0 /m/lib/libmpi.so.12"


def test_types_of_srun_are_read_and_chosen():
    text = (
        "MPI plugin types are...\n\tnone\n\tpmi2\n\tcray_shasta\n\tpmix\nspecific pmix plugin "
        "versions available: "
    )
    text += "pmix_v3,pmix_v4\n"
    types = parse(text)
    assert types == ("none", "pmi2", "cray_shasta", "pmix", "pmix_v3", "pmix_v4")
    assert parse("srun: MPI types are...\nsrun: none\nsrun: pmi2\n") == ("none", "pmi2")
    assert parse("srun: fatal error without a list") == ()
    cray = "MPI VERSION : CRAY MPICH version 8.1 /m/lib/libmpi.so"
    for abi, library, offered, expected in [
        ("openmpi", OPEN, types, "pmix"),
        ("openmpi", OPEN, ("pmix_v3", "pmix_v4"), "pmix_v4"),
        ("openmpi", OPEN, ("pmi2",), ""),
        ("mpich", MPICH, types, "pmi2"),
        ("mpich", cray, types, "cray_shasta"),
        ("mpich", MPICH, ("pmix",), ""),
    ]:
        assert choose(abi, library, offered) == expected
