"""A small Hugging Face Hub on 127.0.0.1, for tests: the few routes that downloading needs, and its ways to fail.

    with FakeHub({"org/name": {"config.json": b"{}"}}) as hub:
        use_hub(monkeypatch, hub.url, cache)                # in this process
        subprocess.run(command, env=hub.environment(cache)) # in another one
        hub.failures["org/name"] = "gated"

A repository is a folder or a dict of file names and bytes; "org/name@v1" is another revision of org/name. Weights and
tokenizer.model are served as large files are: their ETag is their SHA-256.
"""

import hashlib
import json
import os
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from openelm_mlx.errors import OpenELMError

Repo = Mapping[str, bytes] | Path
TOKEN = "hf_secretsecretsecret"
LARGE = (".safetensors", ".bin", ".model")

# What `FakeHub.failures` takes: (status, X-Error-Code, X-Error-Message) ...
REFUSALS = {
    "401": (401, "", "Invalid credentials in Authorization header"),
    "403": (403, "", "Forbidden"),
    "404": (404, "RepoNotFound", "Repository not found"),
    "429": (429, "", "Too many requests"),
    "500": (500, "", "Internal error"),
    "503": (503, "", "Service unavailable"),
    "disabled": (403, "", "Access to this resource is disabled."),
}
# ... the same for requests of a file only, ...
FILE_REFUSALS = {
    "gated": (403, "GatedRepo", "Access is restricted"),  # 401 without a token
    "no file": (404, "EntryNotFound", "Entry not found"),  # though it is listed
    "file 429": REFUSALS["429"],
    "file 503": REFUSALS["503"],
}
# ... or bad answers: silence until the hub stops, a web page, and for large files: half of the first answer to each,
# half of an answer and then nothing, one wrong byte.
BAD_ANSWERS = ("slow", "web page", "cut", "dead", "corrupt")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    authorization: str | None
    range: str | None


class FakeHub:
    """`repos` and `failures` may be changed while it runs; `requests` is the log of what was asked."""

    def __init__(self, repos: Mapping[str, Repo]):
        self.repos = dict(repos)
        self.failures: dict[str, str] = {}
        self.requests: list[Request] = []
        self.stopped = threading.Event()
        self._server = _QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From now on connections are refused."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._server.shutdown()
            self._server.server_close()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """This process's environment for a child that shall know no other Hub, cache (below `home`) or token."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        return clean | ours | more

    def files(self, repo: str, revision: str = "main") -> tuple[str, dict[str, bytes]] | None:
        """(commit, its files) of a branch, tag or commit; None where there is none."""
        for key, content in self.repos.items():
            commit = hashlib.sha1(key.encode()).hexdigest()
            name, _, label = key.partition("@")
            if name == repo and revision in (label or "main", commit):
                if isinstance(content, Path):
                    content = {path.name: path.read_bytes() for path in sorted(content.iterdir())}
                return commit, dict(content)
        return None

    def downloads(self) -> list[str]:
        """The files that were fetched, once for each request."""
        return [r.path.split("/resolve/")[1].split("/", 1)[1] for r in self.requests if _is_download(r)]


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, home: Path, *, token: str | None = None) -> None:
    """Turn this process's huggingface_hub to a Hub, with a cache (below `home`) and a token of its own.

    It reads the environment when it is imported, hence the constants.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN", token or "")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    close_session()  # a client keeps the proxies and connections that it began with


def one_safe_line(error: OpenELMError) -> str:
    """The message of an error, which is one line and gives no token away, not even to a debugger."""
    whole = "".join(traceback.format_exception(error)) + repr(error.__context__) + repr(error.__cause__)
    assert "secret" not in whole
    assert error.__context__ is None
    assert "\n" not in str(error)
    return str(error)


def _is_download(request: Request) -> bool:
    return request.method == "GET" and "/resolve/" in request.path


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms an answer, otherwise

    def log_message(self, format: str, *args: object) -> None:
        pass  # a test's stderr is the program's

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, headers = unquote(urlsplit(self.path).path), self.headers
        self.hub.requests.append(Request(self.command, path, headers.get("Authorization"), headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            repo = "/".join(parts[2:4])
            route, revision = parts[4:6] or ["revision", "main"]
        elif len(parts) >= 5 and parts[2] == "resolve":
            repo, route, revision = "/".join(parts[:2]), "resolve", parts[3]
        else:
            return self._refuse(404, "", "no such route")
        failure = self.hub.failures.get(repo, "")
        if failure == "slow":
            self.hub.stopped.wait()
        if failure == "web page":
            return self._reply(200, b"<html>Please log in</html>", {"Content-Type": "text/html"})
        refusal = REFUSALS.get(failure) or (FILE_REFUSALS.get(failure) if route == "resolve" else None)
        if refusal is not None:
            return self._refuse(*refusal)
        if not any(key.partition("@")[0] == repo for key in self.hub.repos):
            return self._refuse(*REFUSALS["404"])
        found = self.hub.files(repo, revision)
        if found is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, files = found
        if route != "resolve":
            return self._list(repo, route, commit, files)
        name = "/".join(parts[4:])
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._send_file(name, files[name], commit, failure)

    def _list(self, repo: str, route: str, commit: str, files: dict[str, bytes]) -> None:
        """/api/models/{repo}[/revision/{revision}], or /api/models/{repo}/tree/{revision}."""
        if route == "tree":
            answer: object = [
                {"type": "file", "path": name, "oid": _git_hash(data), "size": len(data)}
                | ({"lfs": _large_file(data)} if name.endswith(LARGE) else {})
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            answer = {"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        self._reply(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, data: bytes, commit: str, failure: str) -> None:
        """/{repo}/resolve/{revision}/{file}, from the byte that a Range header names."""
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_hash(data)}"', "Accept-Ranges": "bytes"}
        sent = data
        if name.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
            if failure == "corrupt":
                sent = data[:-1] + bytes([data[-1] ^ 1])
        resumed = self.headers.get("Range", "")
        start = int(resumed.removeprefix("bytes=").rstrip("-") or 0)
        if resumed:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = sent[start:]
        if name.endswith(LARGE) and (failure == "dead" or (failure == "cut" and not resumed)):
            body = body[: 0 if resumed else len(data) // 2]
        self._reply(206 if resumed else 200, body, headers, length=len(data) - start)

    def _refuse(self, status: int, code: str, message: str) -> None:
        if code in ("GatedRepo", "RepoNotFound") and not self.headers.get("Authorization"):
            status = 401  # the Hub tells strangers no more
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        if status == 429:
            headers["Retry-After"] = "300"
        self._reply(status, json.dumps({"error": message}).encode(), headers)

    def _reply(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        """`length` is what is promised, `body` what is sent."""
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body) if length is None else length)}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.close_connection = length not in (None, len(body))


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _large_file(data: bytes) -> dict[str, object]:
    return {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}


class _QuietServer(ThreadingHTTPServer):
    """A client that gave up waiting is no news: its traceback would land in the output of whichever test runs then."""

    def handle_error(self, request, client_address):
        pass
