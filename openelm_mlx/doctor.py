"""What this machine can do, and what to fix.

One line for each thing that OpenELM needs: ok, a warning, or a problem, and then what to do about it. The exit
status is 2 if there is a problem.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from .config import PUBLISHED_SIZES, OpenELMConfig
from .doctor_machine import OK, PROBLEM, WARNING, Check, Mlx, check_machine, check_mlx, check_packages, try_mlx
from .errors import HubError, OpenELMError
from .hub import _GATED_LLAMA, _OPEN_LLAMA
from .hub_download import cached_folder
from .hub_errors import UnavailableError, Wanted, ask

_ASKED_MODEL = "apple/OpenELM-270M-Instruct"
_TOKENIZER = "tokenizer.model"
_TIMEOUT_S = 4.0
_FORMS = ("bf16", "4-bit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `openelm doctor`."""
    parser.add_argument("--offline", action="store_true", help="do not ask the Hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the lines")


def run(args: argparse.Namespace) -> int:
    """Check and report. Raises OpenELMError (exit status 2) when something must be mended."""
    mlx = try_mlx()
    usable, fits = _memory(mlx)
    done = []
    for check in _checks(mlx, usable, fits, args.offline):
        done.append(check)
        if not args.json:
            print(_line(check), flush=True)
    if args.json:
        print(json.dumps({"checks": [asdict(check) for check in done], "usable_bytes": usable, "fits": fits}))
    problems = [check.name for check in done if check.status == PROBLEM]
    if problems:
        raise OpenELMError(f"found a problem with {', '.join(problems)}; the report says how to mend it")
    return 0


def _checks(mlx: Mlx, usable: int, fits: dict[str, list[str]], offline: bool) -> Iterator[Check]:
    """Every check, in the order in which things need each other."""
    machine = list(check_machine(mlx))
    yield from machine
    yield from check_mlx(mlx, machine)
    yield check_packages()
    whose = "Metal's recommendation" if mlx.metal else "two thirds"
    yield Check("memory", OK, f"{_gb(_total_bytes())}, {_gb(usable)} of it for a model ({whose})")
    if fits:
        yield _check_sizes(fits)
    yield _check_disk("disk here", Path.cwd(), "or convert to another disk with -o")
    if find_spec("huggingface_hub") is None:  # the packages' line has said so
        return
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser()
    yield _check_disk("Hub cache", cache, "or move it to another disk: export HF_HOME=FOLDER")
    yield from _check_hub(offline or bool(constants.HF_HUB_OFFLINE), constants.ENDPOINT)


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory(mlx: Mlx) -> tuple[int, dict[str, list[str]]]:
    """(bytes that a model may take, published sizes that fit for each form); no sizes where numpy is missing."""
    try:
        from . import memory
    except ImportError:
        return _total_bytes() * 2 // 3, {}
    usable = mlx.available_bytes if mlx.metal else memory.usable_bytes(_total_bytes())
    configs = {size.replace("_", "."): OpenELMConfig.from_name(size) for size in PUBLISHED_SIZES}
    return usable, {
        form: [
            size
            for size, config in configs.items()
            if memory.generation_bytes(config, memory.form(config, form)) <= usable
        ]
        for form in _FORMS
    }


def _check_sizes(fits: dict[str, list[str]]) -> Check:
    found = "; ".join(f"{form}: {', '.join(sizes) or 'none'}" for form, sizes in fits.items())
    if len(fits["4-bit"]) < len(PUBLISHED_SIZES):
        return Check("fits", WARNING, found, "take a size that fits, or a machine with more memory")
    return Check("fits", OK, found)


def _check_disk(name: str, folder: Path, way_out: str) -> Check:
    """Free space for the published models in bf16, as they are downloaded and converted."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Check(name, WARNING, f"{folder}: {error.strerror}", f"mend its permissions, {way_out}")
    found = f"{folder}: {_gb(free)} free"
    if not os.access(there, os.W_OK):
        return Check(name, WARNING, f"{found}, but not writable", f"mend its permissions, {way_out}")
    needed = {size.replace("_", "."): 2 * OpenELMConfig.from_name(size).num_parameters() for size in PUBLISHED_SIZES}
    room = [size for size, nbytes in needed.items() if nbytes <= free]
    if not room:
        smallest = next(iter(needed))
        found += f", expected {_gb(needed[smallest])} for {smallest}, the smallest model"
        return Check(name, PROBLEM, found, f"free some space, {way_out}")
    if len(room) < len(needed):
        return Check(name, WARNING, f"{found}, room for up to {room[-1]} in bf16", f"free some space, {way_out}")
    return Check(name, OK, found)


def _check_hub(offline: bool, endpoint: str) -> Iterator[Check]:
    """Whether the Hub answers, knows us, and where LLaMA's tokenizer will come from."""
    from huggingface_hub import HfApi, get_token

    if offline:
        yield Check("Hub", OK, "not asked: offline")
        yield _check_tokenizer(False, False)
        return
    wanted = Wanted(_ASKED_MODEL, "", "or work with local folders")
    try:
        has_token = ask(get_token, wanted) is not None
        ask(lambda: HfApi().model_info(_ASKED_MODEL, timeout=_TIMEOUT_S), wanted)
    except UnavailableError as error:
        yield Check("Hub", PROBLEM, f"{endpoint} does not give {_ASKED_MODEL} to you", str(error))
    except HubError as error:
        yield Check("Hub", WARNING, f"{endpoint} is out of reach", str(error))
        yield _check_tokenizer(False, False)
    else:
        login = "your token is accepted" if has_token else "not logged in, which public models do not need"
        yield Check("Hub", OK, f"{endpoint} answers; {login}")
        yield _check_tokenizer(True, has_token)


def _check_tokenizer(reachable: bool, has_token: bool) -> Check:
    """Apple's models come without one: in the cache, from Meta's gated repository, or from an open copy."""
    for repo in (_GATED_LLAMA, _OPEN_LLAMA):
        folder = cached_folder(repo)
        if folder is not None and (folder / _TOKENIZER).is_file():
            return Check("tokenizer", OK, f"LLaMA's, in the Hub cache (from {repo})")
    if not reachable:
        return Check(
            "tokenizer", WARNING, "LLaMA's is not in the Hub cache", "go online once, or pass --tokenizer FILE"
        )
    copy = f"LLaMA's will come from {_OPEN_LLAMA}, which has the same file"
    if not has_token:
        return Check("tokenizer", OK, f"{copy} ({_GATED_LLAMA} is gated: it takes a login and an accepted licence)")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        wanted = Wanted(_GATED_LLAMA, "", "or leave it", file=_TOKENIZER)
        ask(lambda: get_hf_file_metadata(hf_hub_url(_GATED_LLAMA, _TOKENIZER), timeout=_TIMEOUT_S), wanted)
    except HubError as error:
        return Check("tokenizer", OK, f"{copy} ({error})")
    return Check("tokenizer", OK, f"LLaMA's will come from {_GATED_LLAMA}: your account has access")


def _line(check: Check) -> str:
    line = f"{check.status:<8} {check.name:<10} {check.found}"
    return f"{line}\n{'':<20}fix: {check.fix}" if check.fix else line


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
