"""A finished model folder onto the Hub, with its model card: one commit, or nothing.

    check_upload("me/OpenELM-270M-4bit")     before the work: the name, the token, whether it may write
    upload(folder, "me/OpenELM-270M-4bit", card=model_card(...), dry_run=False)

huggingface_hub does the transfer. Its `upload_folder` may take several commits, between which the repository holds
half a model, and needs the card in the folder; hence `create_commit`.
"""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from . import __version__
from .errors import CheckpointError, HubError
from .hub_download import model_files, say
from .hub_errors import Wanted, explain

T = TypeVar("T")

_CARD = "README.md"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_ANSWER_TIMEOUT_S = 10.0
# What a status means when something is sent; `hub_errors` has the words for the others.
_REFUSALS = {
    400: "the Hub does not accept the name or the model card of {repo} ({why})",
    403: "your token may not write to {repo} ({why}): make one that may, at https://huggingface.co/settings/tokens, "
    "or choose a namespace of yours",
    404: "the Hub knows no place for {repo} ({why}): check the spelling",
    409: "somebody else changes {repo} just now ({why}): run again",
    412: "somebody else changes {repo} just now ({why}): run again",
}


def check_upload(repo: str, *, dry_run: bool = False) -> None:
    """Raise HubError if an upload to a repository cannot succeed, before the work for it is done."""
    if dry_run:
        _check_name(repo)
    else:
        _check_login(repo, "or leave --upload-repo out")


def upload(folder: Path, repo: str, *, card: str, dry_run: bool, private: bool = False) -> str:
    """Send a model folder's files and the card (as README.md) to `repo`, made if it is not there; return its address.

    Weights of an earlier upload that this one does not replace are removed: a reader would take them for shards.
    A dry run prints what would be sent and asks nobody. Raises HubError, CheckpointError where there is no model.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

    _check_name(repo)
    files = _files(folder)
    address = f"{constants.ENDPOINT}/{repo}"
    if dry_run:
        print(_plan(files, repo, card, private))
        return address
    again = f"hf upload {shlex.quote(repo)} {shlex.quote(str(folder))} .{' --private' if private else ''}"
    way_out = f"the model itself is done, in {folder}; upload it later with `{again}`"
    _check_login(repo, way_out)
    api = HfApi()
    _ask(lambda: api.create_repo(repo, private=private, exist_ok=True), repo, way_out)
    there = _ask(lambda: api.list_repo_files(repo), repo, way_out)
    stale = [name for name in there if name not in files and any(fnmatchcase(name, weights) for weights in _WEIGHTS)]
    if stale:
        say(f"removing the weights of an earlier upload: {', '.join(stale)}")
    say(f"uploading to {address}: {len(files) + 1} files, {sum(map(_size, files.values())) / 1e6:,.1f} MB")
    operations: list[Any] = [
        *(CommitOperationDelete(name) for name in stale),
        *(CommitOperationAdd(name, path) for name, path in files.items()),
        CommitOperationAdd(_CARD, card.encode()),
    ]
    message = f"Upload with openelm-mlx {__version__}"
    with _bars_only_in_a_terminal():
        _ask(lambda: api.create_commit(repo, operations, commit_message=message), repo, way_out)
    return address


def _files(folder: Path) -> dict[str, Path]:
    """Name -> path of what is sent: the folder's own files, nothing hidden and nothing below."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    files = {path.name: path for path in paths if path.is_file() and not path.name.startswith(".")}
    if not model_files(list(files)):
        raise CheckpointError(f"{folder} has no config.json with *.safetensors: expected a converted model to upload")
    files.pop(_CARD, None)  # that of the source
    return files


@contextmanager
def _bars_only_in_a_terminal() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _plan(files: dict[str, Path], repo: str, card: str, private: bool) -> str:
    sizes = {name: _size(path) for name, path in files.items()} | {_CARD: len(card.encode())}
    width = max(map(len, sizes))
    lines = [f"  {name:<{width}} {size:>15,} bytes" for name, size in sizes.items()]
    kind = "private" if private else "public"
    head = f"dry run: would upload {len(sizes)} files, {sum(sizes.values()):,} bytes, to {repo} ({kind})"
    return "\n".join([head, *lines, "", f"{_CARD}:", "", card])


def _size(path: Path) -> int:
    return path.stat().st_size


def _check_name(repo: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
        valid = "/" in repo and repo.isprintable()  # the first releases let a line end through
    except HFValidationError:
        valid = False
    if not valid:
        raise HubError(f"{repo!r} cannot name a repository: expected a Hub id (your-name/model-name)")


def _check_login(repo: str, way_out: str) -> None:
    """A token is there, the Hub takes it, and it is not for reading only."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def whoami() -> dict[str, Any]:  # HfApi's would wait for ever
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        response = get_session().get(url, headers=build_hf_headers(), timeout=_ANSWER_TIMEOUT_S)
        hf_raise_for_status(response)
        return response.json()

    _check_name(repo)
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"uploading to {repo} needs the Hub, but HF_HUB_OFFLINE is set: unset it, {way_out}")
    if _ask(get_token, repo, way_out) is None:
        raise HubError(f"uploading to {repo} needs a token that may write: log in (`hf auth login`), {way_out}")
    account = _ask(whoami, repo, way_out)
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise HubError(f"{_REFUSALS[403].format(repo=repo, why='it is for reading')}, {way_out}")


def _ask(call: Callable[[], T], repo: str, way_out: str) -> T:
    """The result of a call into huggingface_hub. Raises HubError, without a chain that could quote the token."""
    try:
        return call()
    except Exception as error:
        failure = _explain(error, repo, way_out)
    raise failure


def _explain(error: BaseException, repo: str, way_out: str) -> HubError:
    chain: list[Any] = list(_chain(error))
    responses = [cause.response for cause in chain if getattr(cause, "response", None) is not None]
    status = responses[0].status_code if responses else None
    if status in _REFUSALS:
        return HubError(f"{_REFUSALS[status].format(repo=repo, why=status)}, {way_out}")
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    if responses or names & {"TransportError", "JSONDecodeError", "UnicodeEncodeError"}:
        return explain(error, Wanted(repo, _CARD, way_out))
    words = [cause.strerror for cause in chain if isinstance(cause, OSError) and cause.strerror]
    return HubError(f"the upload to {repo} failed ({(words or [type(error).__name__])[-1]}): run again, {way_out}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
