"""The Hub's cache, and how files get into it: listed, announced, fetched, checked.

huggingface_hub does the transfer (resuming, xet, the layout of the cache). Added here: only the files that are needed
and never code; an early refusal, where the library would retry for minutes; and the SHA-256, which it does not compare
on plain HTTP. A branch is noted in the cache last, so that an interrupted download is never taken for a whole one.
Looking into the cache imports nothing but huggingface_hub's constants.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .config import read_json_object
from .errors import ConfigError, HubError
from .hub_errors import UnavailableError, Wanted, ask

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE*",
    "README.md",
)
_WEIGHTS = (("*.safetensors.index.json", "*.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model*.bin"))
_ANSWER_TIMEOUT_S = 10.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 22

BeforeWeights = Callable[[Path, int], None]  # a snapshot without its weights, and how many bytes of them will come


def cached_folder(repo: str, revision: str = "main") -> Path | None:
    """The cached snapshot of a branch, tag or commit, whole or not; None where there is none."""
    storage = _storage(repo)
    ref = storage / "refs" / revision
    try:
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        folder = storage / "snapshots" / commit
        return folder if folder.is_dir() else None
    except OSError:  # a revision too long for a file name, a cache that may not be read
        return None


def model_files(names: Sequence[str]) -> list[str]:
    """What a model needs of a repository, else what a PEFT adapter does, nothing if it has neither.

    Weights come last: who has them has the rest.
    """
    index, shards = _weights(names)
    if "config.json" not in names or not shards:
        return _adapter_files(names)
    texts = [name for name in _matching(names, *_TEXT_FILES) if not name.endswith(".py")]
    return texts + index + shards


def is_whole_model(folder: Path) -> bool:
    """Whether a snapshot has a configuration and every weight file that it speaks of, or is a whole adapter."""
    names = [path.name for path in folder.iterdir() if path.is_file()]  # a link to a lost blob is no file
    index, shards = _weights(names)
    try:
        maps = [read_json_object(folder / name).get("weight_map") for name in index]
    except ConfigError:
        return False
    listed = {shard for weight_map in maps if isinstance(weight_map, dict) for shard in weight_map.values()}
    if "config.json" not in names:
        return bool(_adapter_files(names))
    return bool(shards) and listed <= set(names)


def download(
    wanted: Wanted, choose: Callable[[Sequence[str]], list[str]], before_weights: BeforeWeights | None = None
) -> Path:
    """Fetch what `choose` picks from the repository's file names; return the snapshot that has it all.

    Raises HubError, also when the cache's volume has too little room; UnavailableError where the repository, or the
    files needed, are not to be had.
    """
    from huggingface_hub import HfApi

    info = ask(lambda: HfApi().model_info(wanted.repo, revision=wanted.revision, timeout=_ANSWER_TIMEOUT_S), wanted)
    names = choose([sibling.rfilename for sibling in info.siblings or ()])
    if not names:
        raise UnavailableError(f"{wanted.repo} has no {wanted.needs}, {wanted.way_out}")
    commit = str(info.sha)
    folder = _storage(wanted.repo) / "snapshots" / commit
    missing = [replace(wanted, file=name) for name in names if not (folder / name).is_file()]
    # Asked of every file before the first is fetched: 401, 403 and 429 show here, at once.
    metadata = [_metadata(file, commit) for file in missing]
    if missing:
        size = sum(data.size or 0 for data in metadata)
        count = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
        _check_room(wanted, size, [data.etag or "" for data in metadata])
        say(f"downloading {wanted.repo} ({wanted.revision}): {count}, {_human(size)}")
    weights = [data.size or 0 for file, data in zip(missing, metadata, strict=True) if _is_weight(file.file)]
    for file, data in zip(missing, metadata, strict=True):
        if before_weights is not None and _is_weight(file.file):
            before_weights(folder, sum(weights))
            before_weights = None
        _fetch(file, commit, data.etag or "")
    ask(lambda: _write_ref(wanted, commit), wanted)
    return folder


def discard(path: Path) -> None:
    """Take a file out of the cache: the blob and the link to it."""
    for target in (path.resolve(), path):
        with suppress(OSError):  # somebody else's cache; the file is refused all the same
            target.unlink()


def sha256_of(path: Path, tick: Callable[[int], object] = lambda count: None) -> str:
    """A file's SHA-256, read in pieces; `tick` is told the bytes of each."""
    import hashlib  # a model on this disk needs no hash

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            tick(len(chunk))
    return digest.hexdigest()


def say(text: str) -> None:
    """A line for the user; stdout is for results."""
    print(text, file=sys.stderr)


def _weights(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The (indexes, shards) to take: safetensors; PyTorch's only where there are none."""
    for index, shards in _WEIGHTS:
        if found := _matching(names, shards):
            return _matching(names, index), found
    return [], []


def _adapter_files(names: Sequence[str]) -> list[str]:
    """A PEFT adapter's two files, where a repository has both and is no model."""
    weights = [name for name in ("adapter_model.safetensors", "adapter_model.bin") if name in names]
    return ["adapter_config.json", weights[0]] if weights and "adapter_config.json" in names else []


def _matching(names: Sequence[str], *patterns: str) -> list[str]:
    """Names in the root of the repository that fit; a folder's content is never a model's."""
    return [name for name in names if "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)]


def _storage(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"


def _metadata(file: Wanted, commit: str) -> Any:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(file.repo, file.file, revision=commit)
    return ask(lambda: get_hf_file_metadata(url, timeout=_ANSWER_TIMEOUT_S), file)


def _fetch(file: Wanted, commit: str, etag: str) -> None:
    """One file into the cache. The ETag of a large file is its SHA-256; a damaged one is thrown away."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    path = Path(ask(lambda: hf_hub_download(file.repo, file.file, revision=commit), file))
    if _SHA256.fullmatch(etag) is None:
        return
    with tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=f"checking {path.name}", disable=None) as bar:
        intact = sha256_of(path, bar.update) == etag
    if not intact:
        discard(path)
        raise HubError(f"{file} arrived damaged (its SHA-256 is not the Hub's), deleted: run again, {file.way_out}")


def _is_weight(name: str) -> bool:
    return any(fnmatchcase(name, shards) for _, shards in _WEIGHTS)


def _check_room(wanted: Wanted, size: int, etags: Sequence[str]) -> None:
    """Raise HubError when the cache cannot hold what will come; what an interrupted transfer left counts as there."""
    import shutil

    storage = _storage(wanted.repo)
    parent = next((folder for folder in (storage, *storage.absolute().parents) if folder.is_dir()), None)
    if parent is None:
        return
    begun = [file for etag in etags if etag for file in (storage / "blobs").glob(f"{etag}*.incomplete")]
    needed, free = size - sum(file.stat().st_size for file in begun), shutil.disk_usage(parent).free
    if free < needed:
        raise HubError(
            f"{wanted.repo} needs {_human(needed)} in the Hub cache, {parent} has {_human(free)} free: "
            f"make room, or move the cache with HF_HOME, {wanted.way_out}"
        )


def _write_ref(wanted: Wanted, commit: str) -> None:
    ref = _storage(wanted.repo) / "refs" / wanted.revision
    if wanted.revision == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    draft = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    draft.write_text(commit, encoding="utf-8")
    draft.replace(ref)


def _human(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:,.2f} GB"
