"""Where the machine's electricity comes from, which decides how fast it runs: mains or battery, saving or not."""

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

_SUPPLIES = Path("/sys/class/power_supply")
_PROFILE = Path("/sys/firmware/acpi/platform_profile")


def power_record() -> dict[str, Any]:
    """`power_source` is "mains", "battery" or None; `low_power_mode` True, False or None: unknown is None."""
    if platform.system() == "Darwin":
        return read_pmset(_pmset("-g", "batt"), _pmset("-g"))
    return {"power_source": _linux_source(_SUPPLIES), "low_power_mode": _linux_low_power(_PROFILE)}


def read_pmset(battery: str, settings: str) -> dict[str, Any]:
    """What `pmset -g batt` and `pmset -g` say. A Mac without a battery draws from AC Power as well."""
    source = {"AC Power": "mains", "Battery Power": "battery"}
    drawn = re.search(r"drawing from '([^']+)'", battery)
    mode = re.search(r"^\s*lowpowermode\s+(\d)", settings, re.MULTILINE)
    return {
        "power_source": source.get(drawn[1]) if drawn else None,
        "low_power_mode": mode[1] == "1" if mode else None,
    }


def _pmset(*arguments: str) -> str:
    try:
        asked = subprocess.run(["/usr/bin/pmset", *arguments], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout


def _linux_source(supplies: Path) -> str | None:
    """Mains when any adapter is plugged in; battery when there are batteries and none is."""
    kinds = {folder: _read(folder / "type") for folder in sorted(supplies.glob("*"))}
    if any(kind in ("Mains", "USB") and _read(folder / "online") == "1" for folder, kind in kinds.items()):
        return "mains"
    return "battery" if "Battery" in kinds.values() else None


def _linux_low_power(profile: Path) -> bool | None:
    found = _read(profile)
    return None if found is None else found in ("low-power", "quiet")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
