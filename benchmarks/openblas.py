"""OpenBLAS for the scripts here, on Linux, where MLX's wheel brings a much slower reference BLAS."""

import os
import platform
import sys
from pathlib import Path

WITH_OPENBLAS = Path(__file__).resolve().parent.parent / "scripts" / "with-openblas"
_STARTED_AGAIN = "OPENELM_WITH_OPENBLAS"


def preload_openblas() -> None:
    """Start this process again through `scripts/with-openblas`, once, where there is such a script (a checkout)."""
    if platform.system() != "Linux" or _STARTED_AGAIN in os.environ or not WITH_OPENBLAS.is_file():
        return
    again = ["sh", str(WITH_OPENBLAS), sys.executable, *sys.orig_argv[1:]]
    os.execve("/bin/sh", again, {**os.environ, _STARTED_AGAIN: "1"})
