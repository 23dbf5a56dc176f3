"""What this machine is and can hold: the only module that knows Metal, with a plain answer everywhere else."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

# Beside the weights a run needs the cache, activations and buffers kept for reuse.
_WORKING_MARGIN_BYTES = 512 * 2**20


def is_metal() -> bool:
    """Whether MLX computes on a Metal GPU here."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def total_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """Memory a new model may take: free memory on Linux; on a Mac, whose GPU shares it, the recommended working set."""
    if is_metal():
        return int(mx.device_info().get("max_recommended_working_set_size", total_memory_bytes()))
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return total_memory_bytes()


@contextmanager
def wired_limit(model_bytes: int) -> Iterator[None]:
    """Keep a model of this size resident on the GPU while the block runs; the earlier limit returns afterwards.

    The limit follows the model, never the whole machine: wiring all memory for a small model starves everything else.
    """
    if not is_metal():
        yield
        return
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    before = mx.set_wired_limit(min(recommended, model_bytes + _WORKING_MARGIN_BYTES))
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)


def machine_record() -> dict[str, Any]:
    """This machine as a benchmark names it: chip, cores, memory, system, power, Python, MLX; not its owner."""
    from importlib.metadata import version  # takes longer to import than a model's headers take to read

    from .power import power_record

    return {
        "chip": chip_name(),
        "cpu_cores": os.cpu_count(),
        "gpu_cores": gpu_cores(),
        "memory_bytes": total_memory_bytes(),
        "os": f"{platform.system()} {platform.mac_ver()[0] or platform.release().split('-')[0]}",
        "machine": platform.machine(),
        "backend": "metal" if is_metal() else "cpu",
        **power_record(),
        "blas_preloaded": bool(os.environ.get("LD_PRELOAD")) if platform.system() == "Linux" else None,
        "python": platform.python_version(),
        "mlx": version("mlx"),
    }


def chip_name() -> str:
    """`Apple M2 Max` on a Mac, the processor's name elsewhere."""
    if platform.system() == "Darwin":
        import subprocess

        asked = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or platform.processor()
    return str(mx.device_info().get("device_name", platform.processor()))


def gpu_cores() -> int | None:
    """How many cores the GPU has: two Macs with the same chip name may differ in this. None where there is no Metal."""
    if not is_metal():
        return None
    import re
    import subprocess

    asked = subprocess.run(
        ["/usr/sbin/ioreg", "-r", "-c", "AGXAccelerator", "-d", "1"], capture_output=True, text=True, check=False
    )
    found = re.search(r'"gpu-core-count"\s*=\s*(\d+)', asked.stdout)
    return int(found[1]) if found else None
