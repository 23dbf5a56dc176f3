"""A piece of Python timed in a process of its own, whose memory is watched from outside.

Memory is anonymous resident pages (Linux: RssAnon), so that the mapped pages of a file do not count.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ..errors import RunFailedError

_PAUSE_S = 0.002
_RSS_ANON = re.compile(rb"RssAnon:\s+(\d+) kB")
# Imports are done before the clock starts: what is compared is the work.
_PROGRAM = """
import json, sys, time
{imports}
begun = time.perf_counter()
{work}
print(json.dumps(time.perf_counter() - begun))
"""


class Run(NamedTuple):
    """`seconds` of the work, `process_s` with the start of Python; `peak_bytes` is None where the system is silent."""

    seconds: float
    process_s: float
    peak_bytes: int | None


def run_in_child(imports: str, work: str, arguments: Sequence[object]) -> Run:
    """Run `work` after `imports`; it finds `arguments` in sys.argv[1:]. Raises RunFailedError when it fails."""
    program = _PROGRAM.format(imports=imports, work=work)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak: int | None = None
    while child.poll() is None:
        now = _anonymous_bytes(child.pid)
        peak = now if peak is None or (now or 0) > peak else peak
        time.sleep(_PAUSE_S)
    process_s = time.perf_counter() - begun
    output, errors = child.communicate()
    if child.returncode != 0:
        raise RunFailedError(f"{work.strip().splitlines()[0]} failed: {errors.strip().splitlines()[-1:]}")
    return Run(json.loads(output.splitlines()[-1]), process_s, peak)


def interpreter_bytes() -> int | None:
    """The peak of a Python that does nothing."""
    peaks = [run_in_child("", "time.sleep(0.05)", []).peak_bytes for _ in range(3)]
    known = [peak for peak in peaks if peak is not None]
    return int(median(known)) if known else None


def _anonymous_bytes(pid: int) -> int | None:
    try:
        found = _RSS_ANON.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:  # no such file system, or the process has just ended
        return None
    return int(found[1]) * 1024 if found else None
