"""Models and tokenizers by name: a folder, the bundled checkpoint, or a repository of the Hugging Face Hub.

    resolve_model("apple/OpenELM-270M")              a folder on this disk, whatever the name means
    find_tokenizer(None, folder, vocab_size=32000)   where that model's tokenizer is

The cache comes first: what is there needs no network and says nothing. `hub_download` fetches the rest.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import CheckpointError, HubError, TokenizerError
from .hub_download import BeforeWeights, cached_folder, discard, download, is_whole_model, model_files, say, sha256_of
from .hub_errors import UnavailableError, Wanted, ask

BUNDLED_MODEL = Path(__file__).parent / "data" / "tiny"
LLAMA_TOKENIZER_SHA256 = "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"
LLAMA_VOCAB_SIZE = 32000
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")

_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\b[\w.-]+\b/\b[\w.-]{1,96}\b", re.ASCII)
_GATED_LLAMA = "meta-llama/Llama-2-7b-hf"
_OPEN_LLAMA = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"  # has the same file, for everyone


def resolve_model(
    name: str, *, revision: str | None = None, offline: bool = False, before_weights: BeforeWeights | None = None
) -> Path:
    """The folder (or file) on this disk that a model's name means; downloaded when it must be.

    An existing path wins, then `tiny`, then a Hub id. Raises CheckpointError for a name that is none of them, HubError
    when the Hub does not deliver, or may not be asked (`offline`, HF_HUB_OFFLINE). A download shows `before_weights`
    its configuration first: (folder, bytes of weights to come); what that raises ends it.
    """
    path = _on_disk(name)
    if path is not None:
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} is for Hub ids, but {name} is on this disk: drop one of them")
        return path
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name!r} is neither a file or folder here nor a Hub id (org/name): check the spelling")
    needs = "config.json with *.safetensors or pytorch_model*.bin"
    wanted = Wanted(name, needs, "or name a local folder", revision or "main")
    return _from_hub(wanted, is_whole_model, model_files, offline, before_weights)


def is_hub_id(name: str) -> bool:
    """Whether `resolve_model` takes a name for a repository's."""
    return _on_disk(name) is None and _HUB_ID.fullmatch(name) is not None


def find_tokenizer(explicit: str | None, source: Path | None, *, vocab_size: int, offline: bool = False) -> Path:
    """A tokenizer file, or a folder that has one: the one named explicitly, else the source's own, else LLaMA's.

    Raises TokenizerError when there is none to be had, HubError when the Hub does not deliver it.
    """
    if explicit is not None:
        return _explicit_tokenizer(explicit, offline)
    folder = source if source is None or source.is_dir() else source.parent
    if folder is not None and has_tokenizer(folder):
        return folder
    if vocab_size < LLAMA_VOCAB_SIZE:
        raise TokenizerError(
            f"no {' or '.join(TOKENIZER_FILES)} beside the model, and with {vocab_size} tokens it is not LLaMA's "
            f"({LLAMA_VOCAB_SIZE}): pass --tokenizer FILE|DIR|HUB_ID, the one that the model was trained with"
        )
    return _llama_tokenizer(offline)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer that this project reads."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _on_disk(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        exists = bool(name) and path.exists()
        dangling = path.is_symlink() and not exists
    except (OSError, RuntimeError):  # too long for a path; a home directory that nobody has
        return None
    if dangling:
        raise CheckpointError(f"{path} is a link to {path.readlink()}, which is not there: restore that, or the link")
    if exists:
        return path
    return BUNDLED_MODEL if name == "tiny" else None


def _from_hub(
    wanted: Wanted,
    is_whole: Callable[[Path], bool],
    choose: Callable[[Sequence[str]], list[str]],
    offline: bool,
    before_weights: BeforeWeights | None = None,
) -> Path:
    folder = cached_folder(wanted.repo, wanted.revision)
    if folder is not None and is_whole(folder):
        return folder
    if _is_offline(offline):
        raise HubError(f"{wanted} is not in the Hub cache and offline was asked for: go online once, {wanted.way_out}")
    return download(wanted, choose, before_weights)


def _is_offline(offline: bool) -> bool:
    from huggingface_hub import constants

    return offline or bool(constants.HF_HUB_OFFLINE)


def _explicit_tokenizer(name: str, offline: bool) -> Path:
    path = _on_disk(name)
    if path is None:
        if not _HUB_ID.fullmatch(name):
            raise TokenizerError(f"--tokenizer {name!r} is neither a file or folder here nor a Hub id (org/name)")
        wanted = Wanted(name, " or ".join(TOKENIZER_FILES), "or pass --tokenizer FILE")
        return _from_hub(wanted, has_tokenizer, _tokenizer_files, offline)
    if path.is_dir() and not has_tokenizer(path):
        raise TokenizerError(f"--tokenizer {name}: this folder has no {' or '.join(TOKENIZER_FILES)}")
    return path


def _tokenizer_files(names: Sequence[str]) -> list[str]:
    files = [name for name in TOKENIZER_FILES if name in names]
    extras = [name for name in ("tokenizer_config.json", "chat_template.jinja") if name in names]
    return extras + files if files else []


def _llama_tokenizer(offline: bool) -> Path:
    """LLaMA's tokenizer.model: the published OpenELMs use it, their repositories lack it (fault B1)."""
    way_out = "or pass --tokenizer FILE (LLaMA's tokenizer.model)"
    gated, free = (
        Wanted(repo, "tokenizer.model", way_out, file="tokenizer.model") for repo in (_GATED_LLAMA, _OPEN_LLAMA)
    )
    choices = [wanted for wanted in (gated, free) if _has_sentencepiece(cached_folder(wanted.repo))]
    if not choices:
        choices = [gated, free] if not _is_offline(offline) and _has_token(free) else [free]
    *first, last = choices
    for wanted in first:
        try:
            return _accepted_llama(wanted, offline)
        except UnavailableError as error:
            say(f"{error}; trying {last.repo}")
    return _accepted_llama(last, offline)


def _accepted_llama(wanted: Wanted, offline: bool) -> Path:
    """The file from one repository, if it is LLaMA's to the byte."""
    folder = _from_hub(wanted, _has_sentencepiece, lambda names: [n for n in names if n == wanted.file], offline)
    path = folder / wanted.file
    digest = ask(lambda: sha256_of(path), wanted)
    if digest != LLAMA_TOKENIZER_SHA256:
        discard(path)
        raise TokenizerError(
            f"{wanted.repo} has a tokenizer.model that is not LLaMA's (SHA-256 {digest[:12]}, expected "
            f"{LLAMA_TOKENIZER_SHA256[:12]}): refused, {wanted.way_out}"
        )
    say(f"tokenizer: LLaMA's, from {wanted.repo}, under Meta's licence (https://ai.meta.com/llama/license)")
    return path


def _has_sentencepiece(folder: Path | None) -> bool:
    return folder is not None and (folder / "tokenizer.model").is_file()


def _has_token(wanted: Wanted) -> bool:
    from huggingface_hub import get_token

    return ask(get_token, wanted) is not None
