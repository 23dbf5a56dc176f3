"""OpenBLAS for the scripts here, on Linux, where MLX's wheel brings a much slower reference BLAS."""

import os
import platform
import sys
from pathlib import Path

WITH_OPENBLAS = Path(__file__).resolve().parent.parent / "scripts" / "with-openblas"


def preload_openblas() -> None:
    """Start this process again through `scripts/with-openblas`, unless something is preloaded already."""
    if platform.system() != "Linux" or "LD_PRELOAD" in os.environ or not WITH_OPENBLAS.is_file():
        return
    again = ["sh", str(WITH_OPENBLAS), sys.executable, *sys.orig_argv[1:]]
    os.execve("/bin/sh", again, {**os.environ, "LD_PRELOAD": ""})  # set, so that this happens once even without one
