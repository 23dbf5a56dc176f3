"""`fake_hub`'s Hub, which also takes uploads: repositories made, large files stored apart, one commit for the rest.

    with UploadHub({}) as hub:
        use_hub(monkeypatch, hub.url, cache, token=TOKEN)
        hub.failures["me/model"] = "commit 409"   # route and status; a bare status refuses every route

The subset that huggingface_hub asks for without xet, as the Hub answers it. TOKEN is the one token that it knows.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from fake_hub import LARGE, REFUSALS, TOKEN, FakeHub, Repo, Request, _Handler

CONFLICT = (409, "", "Conflict")


class UploadHub(FakeHub):
    """`commits` are (repository, lines) in the order in which they came, `made` the requests for new repositories."""

    def __init__(self, repos: Mapping[str, Repo], *, role: str = "write"):
        super().__init__(repos)
        self.role = role
        self.made: list[dict[str, Any]] = []
        self.commits: list[tuple[str, list[dict[str, Any]]]] = []
        self.stored: dict[str, bytes] = {}  # SHA-256 -> large file
        self._server.RequestHandlerClass = type("Handler", (_UploadHandler,), {"hub": self})


class _UploadHandler(_Handler):
    hub: UploadHub

    def do_POST(self) -> None:
        self._take()

    def do_PUT(self) -> None:
        self._take()

    def _answer(self) -> None:
        if urlsplit(self.path).path != "/api/whoami-v2":
            return super()._answer()
        self._log()
        failure = self.hub.failures.get("whoami", "")
        if failure == "slow":
            self.hub.stopped.wait()
        if failure in REFUSALS:
            return self._refuse(*REFUSALS[failure])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(*REFUSALS["401"])
        return self._send({"name": "me", "auth": {"accessToken": {"role": self.hub.role}}})

    def _take(self) -> None:
        """A POST or PUT: the routes of an upload."""
        path = self._log()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "validate-yaml"]:
            return self._validate(json.loads(body)["content"])
        if parts[0] == "storage":
            return self._store(parts[1], body)
        if parts[:2] == ["api", "repos"]:
            asked = json.loads(body)
            repo, route = f"{asked['organization']}/{asked['name']}", "create"
        elif parts[:2] == ["api", "models"]:
            repo, route = "/".join(parts[2:4]), parts[4]
        else:
            repo, route = "/".join(parts[:2]).removesuffix(".git"), "lfs"
        failure = self.hub.failures.get(repo, "").removeprefix(f"{route} ")
        refusal = CONFLICT if failure == "409" else REFUSALS.get(failure)
        if refusal is not None:
            return self._refuse(*refusal)
        return getattr(self, f"_{route}")(repo, body)

    def _log(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Request(self.command, path, self.headers.get("Authorization"), None))
        return path

    def _send(self, answer: object, status: int = 200) -> None:
        self._reply(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _validate(self, content: str) -> None:
        try:
            metadata = yaml.safe_load(content.split("---\n")[1])
        except (yaml.YAMLError, IndexError):
            metadata = None
        if not isinstance(metadata, dict):
            return self._send({"errors": [{"message": "bad metadata"}], "warnings": []}, 400)
        return self._send({"errors": [], "warnings": []})

    def _create(self, repo: str, body: bytes) -> None:
        is_new = repo not in self.hub.repos
        if is_new:
            self.hub.repos[repo] = {".gitattributes": b""}
        self.hub.made.append(json.loads(body))
        self._send({"url": f"{self.hub.url}/{repo}"}, 200 if is_new else 409)

    def _preupload(self, repo: str, body: bytes) -> None:
        names = [file["path"] for file in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
        self._send({"files": [{"path": n, "uploadMode": mode, "shouldIgnore": False} for n, mode in modes.items()]})

    def _lfs(self, repo: str, body: bytes) -> None:
        objects = json.loads(body)["objects"]
        for item in objects:
            item["actions"] = {"upload": {"href": f"{self.hub.url}/storage/{item['oid']}"}}
        self._send({"transfer": "basic", "objects": objects})

    def _store(self, digest: str, body: bytes) -> None:
        if self.headers.get("Authorization") or hashlib.sha256(body).hexdigest() != digest:
            return self._refuse(400, "", "storage knows no tokens, and its files by their SHA-256")
        self.hub.stored[digest] = body
        return self._reply(200, b"", {})

    def _commit(self, repo: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(self.hub.repos[repo])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.repos[repo] = files
        self.hub.commits.append((repo, lines))
        self._send({"commitUrl": f"{self.hub.url}/{repo}/commit/{'c' * 40}", "commitOid": "c" * 40, "success": True})
