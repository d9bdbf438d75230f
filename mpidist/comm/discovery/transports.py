"""Transports of the running MPI library, as it reports them; no guess from versions or file names.

Sources: Open MPI's component of point-to-point messages (``mca_pml_base_selected_component``),
MPICH's device line of MPI_Get_library_version, control variables (MPI_T, MPI-4.1 §15.3), libraries
mapped into this process, and the kernel's list of RDMA devices. A mapped library is loaded, but
only the MPI library decides, for each pair of ranks, whether it carries messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mpidist.comm.discovery.installed import library_file
from mpidist.comm.mpi.library import MPI

_NETWORK_LIBRARIES = ("libucp", "libfabric", "libpsm2", "libpsm3", "libibverbs", "libcxi")
_DEVICES = ("/sys/class/infiniband", "/sys/class/cxi")
_COMPONENT = "mca_pml_base_selected_component"
# mca_base_component_t of Open MPI 4 and 5 (opal/mca/mca.h), in bytes.
_TYPE_AT, _NAME_AT, _NAME_BYTES = 40, 84, 64
# Empty unless set; a value restricts the library to the transports it names.
_VARIABLES = ("pml", "btl", "mtl", "MPIR_CVAR_CH4_NETMOD", "MPIR_CVAR_OFI_USE_PROVIDER")


@dataclass(frozen=True)
class Transports:
    """Transports known to one process.

    Attributes:
        component: Open MPI's component of point-to-point messages: ``ob1``, ``ucx``, ``cm``; "" if
            unknown.
        device: MPICH's device and its network modules: ``ch4:ofi``; "" if unknown.
        variables: Control variables that restrict transports, by name; empty ones are left out.
        libraries: Network libraries mapped into this process.
        rdma_devices: Names of the node's InfiniBand, RoCE, Omni-Path and Slingshot devices.
    """

    component: str
    device: str
    variables: dict[str, str]
    libraries: tuple[str, ...]
    rdma_devices: tuple[str, ...]


def transports(library_text: str) -> Transports:
    """Read the known transports. Local; MPI must be started.

    Args:
        library_text: The library's description of itself, all lines.
    """
    file = library_file()
    handle = None
    with contextlib.suppress(OSError):
        handle = ctypes.CDLL(file) if file else None
    return Transports(
        component=_selected_component(handle) if "Open MPI" in library_text else "",
        device=device_line(library_text),
        variables=_control_variables(handle),
        libraries=mapped_libraries(Path("/proc/self/maps")),
        rdma_devices=rdma_devices(),
    )


def device_line(library_text: str) -> str:
    """Return the device of MPICH's description, or ""."""
    found = re.search(r"^MPICH Device:\s*(.*?)\s*$", library_text, re.MULTILINE)
    return found[1] if found else ""


def mapped_libraries(maps: Path) -> tuple[str, ...]:
    """Return the network libraries among the files of a ``/proc/PID/maps``."""
    try:
        names = {
            os.path.basename(line.split(maxsplit=5)[-1])
            for line in os.fsdecode(maps.read_bytes()).splitlines()
        }
    except OSError:
        return ()
    return tuple(
        library
        for library in _NETWORK_LIBRARIES
        if any(name.startswith(f"{library}.so") for name in names)
    )


def rdma_devices() -> tuple[str, ...]:
    """Return the names of the node's RDMA devices, as the kernel lists them."""
    found: list[str] = []
    for folder in _DEVICES:
        with contextlib.suppress(OSError):
            found += os.listdir(folder)
    return tuple(sorted(found))


def component_name(raw: bytes) -> str:
    """Return the name at the start of an ``mca_base_component_t``; "" for another layout."""
    if raw[_TYPE_AT : _TYPE_AT + 4] != b"pml\0":
        return ""
    name = raw[_NAME_AT : _NAME_AT + _NAME_BYTES].split(b"\0")[0]
    return name.decode() if re.fullmatch(rb"[a-z0-9_]+", name) else ""


def _selected_component(handle: ctypes.CDLL | None) -> str:
    if handle is None:
        return ""
    try:
        return component_name(
            bytes((ctypes.c_char * (_NAME_AT + _NAME_BYTES)).in_dll(handle, _COMPONENT))
        )
    except ValueError:  # no such symbol
        return ""


def _control_variables(handle: ctypes.CDLL | None) -> dict[str, str]:
    if handle is None or not hasattr(handle, "MPI_T_cvar_get_index"):
        return {}
    provided = ctypes.c_int()
    # MPI's own level: Open MPI's MPI_Query_thread returns this one from then on.
    if handle.MPI_T_init_thread(MPI.Query_thread(), ctypes.byref(provided)):
        return {}
    texts = {name: _control_variable(handle, name) for name in _VARIABLES}
    handle.MPI_T_finalize()
    return {name: text for name, text in texts.items() if text}


def _control_variable(handle: ctypes.CDLL, name: str) -> str:
    index, count, variable = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if handle.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
        return ""
    if handle.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(variable), ctypes.byref(count)):
        return ""
    text = ctypes.create_string_buffer(max(count.value, 1) + 1)
    failed = handle.MPI_T_cvar_read(variable, text)
    handle.MPI_T_cvar_handle_free(ctypes.byref(variable))
    return "" if failed else text.value.decode(errors="replace")
