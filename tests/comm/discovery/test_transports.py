"""Transports of an MPI library, from each source that reports them."""

import pytest

from mpidist.comm.discovery import transports
from mpidist.comm.mpi.library import MPI


def test_the_head_of_a_component_names_it():
    head = bytearray(200)
    head[12:16], head[40:43], head[84:87] = b"ompi", b"pml", b"ucx"
    assert transports.component_name(bytes(head)) == "ucx"
    head[84:87] = b"\x07\x08x"
    assert transports.component_name(bytes(head)) == ""
    head[40:43] = b"btl"
    assert transports.component_name(bytes(head)) == transports.component_name(b"") == ""


def test_a_device_line_and_mapped_libraries_are_read(tmp_path):
    assert (
        transports.device_line("MPICH Version: 5\nMPICH Device:       ch4:ofi \nMPICH CC: cc")
        == "ch4:ofi"
    )
    assert transports.device_line("Open MPI v5") == ""
    maps = tmp_path / "maps"
    maps.write_text(
        "7f0 r-xp 0 08:01 5 /opt/lib/libucp.so.0.0.0\n7f1 r-xp 0 08:01 6 /opt/my "
        "libs/libfabric.so.1\n7f2 rw-p 0 0 0\n"
    )
    assert transports.mapped_libraries(maps) == ("libucp", "libfabric")
    assert transports.mapped_libraries(tmp_path / "gone") == ()


def test_devices_of_the_node_are_listed(tmp_path, monkeypatch):
    (tmp_path / "infiniband" / "mlx5_1").mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_0").mkdir()
    monkeypatch.setattr(
        transports, "_DEVICES", (str(tmp_path / "infiniband"), str(tmp_path / "cxi"))
    )
    assert transports.rdma_devices() == ("mlx5_0", "mlx5_1")


@pytest.mark.mpi
def test_the_running_library_reports_its_transports(world):
    text = MPI.Get_library_version()
    found = transports.transports(text)
    if "Open MPI" in text:
        assert found.component in ("ob1", "ucx", "cm") and not found.device
    else:
        assert found.device.startswith("ch") and not found.component
    assert all(found.variables.values())


@pytest.mark.mpi
def test_the_librarys_thread_level_stays(world):
    """Open MPI takes the level that its tool interface is started with for that of MPI."""
    transports.transports(MPI.Get_library_version())
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
