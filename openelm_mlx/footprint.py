"""The memory that the system charges this process with: what Activity Monitor shows, and what swapping is about.

More than MLX's allocator counts: Python, loaded libraries' data and buffers outside MLX are in it.
"""

import ctypes
import os
import platform
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RUSAGE_INFO_V0 = 0  # sys/resource.h


class _RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of macOS's sys/resource.h."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("pkg_idle_wkups", ctypes.c_uint64),
        ("interrupt_wkups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("proc_start_abstime", ctypes.c_uint64),
        ("proc_exit_abstime", ctypes.c_uint64),
    )


def process_footprint_bytes() -> int | None:
    """macOS's physical footprint; on Linux the anonymous resident pages; None where neither can be had."""
    return _mac_footprint() if platform.system() == "Darwin" else _anonymous_bytes()


def _mac_footprint() -> int | None:
    try:
        info = _RusageInfo()
        failed = ctypes.CDLL(None).proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(info))
    except (OSError, AttributeError):
        return None
    return None if failed else int(info.phys_footprint)


def _anonymous_bytes() -> int | None:
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
