"""What the Hub's failures mean to a user: one line each, with the repository, the reason and the way out.

huggingface_hub chains and wraps its exceptions, and those of its HTTP client can quote request headers, the token among
them. So nothing of the original is kept: `ask` translates it and raises outside the `except` block, without a chain.
"""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import HubError

T = TypeVar("T")


class UnavailableError(HubError):
    """This repository does not give it to this user (gated, private, absent); another one may."""


@dataclass(frozen=True)
class Wanted:
    """What was asked for, and what else the user can do: the words of every message."""

    repo: str
    needs: str  # the files without which the repository is of no use
    way_out: str
    revision: str = "main"
    file: str = ""

    def __str__(self) -> str:
        return f"{self.file} of {self.repo}" if self.file else self.repo


def ask(call: Callable[[], T], wanted: Wanted) -> T:
    """The result of a call into huggingface_hub. Raises HubError for whatever goes wrong in it."""
    try:
        return call()
    except Exception as error:  # no list of its types can be complete: HTTP client, xet, file system
        failure = explain(error, wanted)
    raise failure


def explain(error: BaseException, wanted: Wanted) -> HubError:
    """The HubError that tells a user what an exception from huggingface_hub means."""
    chain = list(_chain(error))
    answer = next((cause for cause in chain if getattr(cause, "response", None) is not None), None)
    if answer is not None:
        unavailable, text = _refusal(answer, wanted)
    else:
        unavailable, text = False, _failure(chain, wanted)
    return (UnavailableError if unavailable else HubError)(f"{text}, {wanted.way_out}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _names(*errors: BaseException) -> set[str]:
    """Class names, bases included. The HTTP client is httpx or httpx2, as huggingface_hub's release has it."""
    return {kind.__name__ for error in errors for kind in type(error).__mro__}


def _refusal(error: Any, wanted: Wanted) -> tuple[bool, str]:
    """The Hub answered, and the answer was no: (whether another repository may do, the reason)."""
    names, status, repo = _names(error), error.response.status_code, wanted.repo
    if "GatedRepoError" in names:
        return True, _gated(status, repo)
    if "RevisionNotFoundError" in names:
        return False, f"{repo} has no revision {wanted.revision!r} ({status}): name a branch, a tag or a whole commit"
    if "EntryNotFoundError" in names:
        return True, f"the Hub has no file {wanted} ({status})"
    if "DisabledRepoError" in names:
        return True, f"{repo} has been disabled on the Hub ({status})"
    if status == 401:
        return True, _unauthorized(error, repo)
    if status == 403:
        return True, f"your token may not read {repo} (403): let it, at https://huggingface.co/settings/tokens"
    if status == 404:
        return True, f"the Hub has no repository {repo} (404): check the spelling, or log in if it is private"
    if status == 429:
        return False, f"the Hub limits your requests ({wanted}, 429): {_pause(error)}, log in to be allowed more"
    state = "is out of order" if status >= 500 else "does not serve this"
    return False, f"the Hub {state} ({wanted}, {status}): try again later"


def _gated(status: int, repo: str) -> str:
    licence = f"accept its licence at https://huggingface.co/{repo}"
    if status == 401:
        return f"{repo} is gated (401): it needs an accepted licence and a token: {licence}, then `hf auth login`"
    return f"{repo} is gated and your account has no access to it ({status}): {licence}"


def _unauthorized(error: Any, repo: str) -> str:
    if "authorization" in error.response.request.headers:
        return f"the Hub refuses your token ({repo}, 401): log in again (`hf auth login`) or renew HF_TOKEN"
    return f"{repo} does not exist or is private (401): check the spelling, or log in (`hf auth login`)"


def _pause(error: Any) -> str:
    seconds = error.response.headers.get("Retry-After", "")
    return f"wait {seconds} s" if seconds.isdecimal() else "wait some minutes"


def _failure(chain: list[BaseException], wanted: Wanted) -> str:
    """No answer came, or what came could not be kept."""
    names = _names(*chain)
    if "TimeoutException" in names:
        return f"the Hub did not answer in time ({wanted}): try again"
    if names & {"ConnectError", "ProxyError"}:
        return (
            f"cannot connect to the Hub ({wanted}: {_system_reason(chain)}): check the network, proxy and HF_ENDPOINT"
        )
    if names & {"LocalProtocolError", "UnicodeEncodeError"}:
        return f"your token cannot be sent to the Hub ({wanted}): it holds odd characters; renew HF_TOKEN"
    if names & {"FileMetadataError", "JSONDecodeError"}:
        return f"what answers is not the Hub ({wanted}): check for a login page, a proxy, and HF_ENDPOINT"
    if names & {"NetworkError", "ProtocolError"} or "Consistency check failed" in str(chain[0]):
        return f"the transfer of {wanted} was cut: run again"
    numbers = {cause.errno for cause in chain if isinstance(cause, OSError)}
    if numbers & {errno.ENOSPC, errno.EDQUOT}:
        return f"the disk is full ({wanted}): free some space, or move the Hub cache with HF_HOME"
    if numbers - {None}:
        return f"cannot keep {wanted} in the Hub cache ({_system_reason(chain)}): check it, or move it with HF_HOME"
    return f"{wanted} could not be fetched ({type(chain[0]).__name__}): try again"


def _system_reason(chain: list[BaseException]) -> str:
    """The operating system's own words, such as `Connection refused`: they tell a dead name from a dead server."""
    words = [cause.strerror for cause in chain if isinstance(cause, OSError) and cause.strerror]
    return " ".join(words[-1].split()) if words else type(chain[0]).__name__
