"""Models by name: local paths first, then the Hub's cache, then the Hub; and each failure is one line of its own.

Faults B2, J2, and the download's share of C4. The Hub is `fake_hub`'s; no test leaves this machine.
"""

import contextlib
import errno
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, one_safe_line, use_hub

from openelm_mlx import hub
from openelm_mlx.errors import CheckpointError, HubError
from openelm_mlx.hub import BUNDLED_MODEL, resolve_model
from openelm_mlx.hub_errors import Wanted, explain

MODEL = "apple/OpenELM-270M"
FILES = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "README.md": b"# OpenELM",
    "LICENSE": b"terms",
    "config.json": b'{"model_type": "openelm"}',
    "configuration_openelm.py": b"raise SystemExit",
    "modeling_openelm.py": b"raise SystemExit",
    "generation_config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 40,
    "pytorch_model.bin": b"the same weights again",
    "onnx/model.safetensors": b"not a model of ours",
}
NEEDED = {"README.md", "LICENSE", "config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture
def served() -> Iterator[FakeHub]:
    with FakeHub({MODEL: FILES}) as fake:
        yield fake


@pytest.fixture(autouse=True)
def _this_hub(served: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, served.url, tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub's pauses between its retries


def log_in(monkeypatch: pytest.MonkeyPatch, token: str = TOKEN) -> None:
    monkeypatch.setenv("HF_TOKEN", token)


def error_of(name: str = MODEL, **options: object) -> str:
    """The message of the HubError that resolving a name ends in; checked for being one line without the token."""
    with pytest.raises(HubError) as caught:
        resolve_model(name, **options)
    return one_safe_line(caught.value)


def snapshot(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# Models


def test_a_repository_becomes_a_folder_with_what_a_model_needs(served, capsys):
    folder = resolve_model(MODEL)
    assert snapshot(folder) == {name: FILES[name] for name in NEEDED}
    assert sorted(served.downloads()) == sorted(NEEDED)  # each once; neither code nor a second copy of the weights
    out, err = capsys.readouterr()
    size = sum(len(FILES[name]) for name in NEEDED)
    assert out == ""
    assert err == f"downloading {MODEL} (main): 5 files, {size / 1e6:.1f} MB\n"


def test_pytorch_weights_are_taken_where_there_are_no_others(served):
    index = json.dumps({"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}).encode()
    served.repos["org/bin"] = {
        "config.json": b"{}",
        "pytorch_model-1.bin": b"one",
        "pytorch_model-2.bin": b"two",
        "pytorch_model.bin.index.json": index,
        "training_args.bin": b"no weights",
    }
    assert set(snapshot(resolve_model("org/bin"))) == set(served.repos["org/bin"]) - {"training_args.bin"}


def test_a_cached_model_needs_no_network_and_says_nothing(served, capsys):
    """Fault J2."""
    folder = resolve_model(MODEL)
    served.stop()
    capsys.readouterr()
    asked = len(served.requests)
    assert resolve_model(MODEL) == folder == resolve_model(MODEL, offline=True) == resolve_model(MODEL, revision="main")
    assert resolve_model(MODEL, revision=folder.name) == folder
    assert len(served.requests) == asked
    assert capsys.readouterr() == ("", "")


def test_a_cached_model_does_not_import_the_client(served, tmp_path):
    resolve_model(MODEL)
    code = f"import sys; from openelm_mlx.hub import resolve_model; print(resolve_model({MODEL!r}).name); "
    code += "print([m for m in ('httpx', 'httpx2', 'mlx', 'huggingface_hub.file_download') if m in sys.modules])"
    served.stop()
    command = [sys.executable, "-c", code]
    root = Path(hub.__file__).parents[1]
    child = subprocess.run(
        command, env=served.environment(tmp_path / "home"), cwd=root, capture_output=True, text=True, check=True
    )
    assert child.stdout.splitlines()[1] == "[]"
    assert child.stderr == ""


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json"])
def test_a_cached_model_with_a_hole_is_completed(served, lost):
    folder = resolve_model(MODEL)
    (folder / lost).resolve().unlink()  # leaves a link to nothing, as a cleaned cache does
    served.requests.clear()
    assert snapshot(resolve_model(MODEL)) == {name: FILES[name] for name in NEEDED}
    assert served.downloads() == [lost]


def test_a_missing_shard_is_seen_without_the_network(served):
    """Fault C4: an index that names more than is there."""
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    shards = {"model-1.safetensors": b"one", "model-2.safetensors": b"two"}
    served.repos["org/two"] = {"config.json": b"{}", "model.safetensors.index.json": index, **shards}
    folder = resolve_model("org/two")
    (folder / "model-2.safetensors").unlink()
    assert "not in the Hub cache" in error_of("org/two", offline=True)
    assert (resolve_model("org/two") / "model-2.safetensors").read_bytes() == b"two"


def test_an_interrupted_download_is_not_taken_for_a_whole_one(served, monkeypatch):
    import huggingface_hub

    fetch = huggingface_hub.hf_hub_download

    def interrupted(repo: str, name: str, **options: object) -> str:
        if name == "model.safetensors":
            raise KeyboardInterrupt
        return fetch(repo, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "hf_hub_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(MODEL)
    assert "not in the Hub cache" in error_of(offline=True)
    assert set(snapshot(resolve_model(MODEL))) == NEEDED


def test_revisions(served):
    served.repos[f"{MODEL}@v1"] = FILES | {"config.json": b'{"old": 1}'}
    new, old = resolve_model(MODEL), resolve_model(MODEL, revision="v1")
    assert (old / "config.json").read_bytes() == b'{"old": 1}'
    assert new != old == resolve_model(MODEL, revision=old.name)
    served.stop()
    assert resolve_model(MODEL, revision="v1", offline=True) == old
    assert resolve_model(MODEL) == new


def test_a_local_path_wins_over_a_hub_id(served, tmp_path):
    local = tmp_path / MODEL
    local.mkdir(parents=True)
    assert resolve_model(MODEL) == Path(MODEL)
    assert resolve_model(str(local)) == local
    (local / "weights.pt").touch()
    assert resolve_model(f"{MODEL}/weights.pt") == Path(MODEL, "weights.pt")
    with pytest.raises(CheckpointError, match=r"revision 'v1' is for Hub ids, but apple/OpenELM-270M is on this disk"):
        resolve_model(MODEL, revision="v1")
    assert served.requests == []


def test_the_bundled_model(tmp_path):
    assert resolve_model("tiny") == BUNDLED_MODEL
    assert (BUNDLED_MODEL / "config.json").is_file()
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny") == Path("tiny")


@pytest.mark.parametrize(
    "name", ["", "gpt2", "a/b/c", "./models/x", "../x/y", "a//b", "a/b--c", "~nobody/x", "x" * 5000, "a/b\n"]
)
def test_what_is_neither_a_path_nor_a_hub_id(served, name):
    with pytest.raises(CheckpointError, match=r"neither a file or folder here nor a Hub id \(org/name\)") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    assert served.requests == []


# Failures


REASONS = {
    "401": r"apple/OpenELM-270M does not exist or is private \(401\)",
    "403": r"your token may not read apple/OpenELM-270M \(403\)",
    "404": r"apple/OpenELM-270M does not exist or is private \(401\)",  # what the Hub tells without a token
    "429": r"the Hub limits your requests \(apple/OpenELM-270M, 429\): wait 300 s",
    "500": r"the Hub is out of order \(apple/OpenELM-270M, 500\): try again later",
    "503": r"the Hub is out of order \(apple/OpenELM-270M, 503\): try again later",
    "disabled": r"apple/OpenELM-270M has been disabled on the Hub \(403\)",
    "gated": r"OpenELM-270M is gated \(401\): it needs an accepted licence and a token: .*/apple/OpenELM-270M, then",
    "no file": r"the Hub has no file README.md of apple/OpenELM-270M \(404\)",
    "file 429": r"the Hub limits your requests \(README.md of apple/OpenELM-270M, 429\): wait 300 s",
    "file 503": r"the Hub is out of order \(README.md of apple/OpenELM-270M, 503\)",
    "web page": r"what answers is not the Hub \(apple/OpenELM-270M\)",
    "dead": r"the transfer of model.safetensors of apple/OpenELM-270M was cut: run again",
    "corrupt": r"model.safetensors of apple/OpenELM-270M arrived damaged",
}
WITH_TOKEN = {
    "401": r"the Hub refuses your token \(apple/OpenELM-270M, 401\): log in again",
    "404": r"the Hub has no repository apple/OpenELM-270M \(404\): check the spelling",
    "gated": r"apple/OpenELM-270M is gated and your account has no access to it \(403\): accept its licence",
}


@pytest.mark.parametrize("failure", REASONS)
def test_each_failure_has_its_own_line(served, failure):
    """Fault B2. None waits: 300 s is what the 429 asks for."""
    served.failures[MODEL] = failure
    message = error_of()
    assert re.search(REASONS[failure], message)
    assert message.endswith(", or name a local folder")
    others = {
        kind: pattern for kind, pattern in REASONS.items() if {kind, failure} != {"401", "404"} and kind != failure
    }
    assert not any(re.search(pattern, message) for pattern in others.values())


@pytest.mark.parametrize("failure", WITH_TOKEN)
def test_with_a_token_the_reason_differs_and_the_token_stays_secret(served, monkeypatch, capfd, failure):
    log_in(monkeypatch)
    served.failures[MODEL] = failure
    assert re.search(WITH_TOKEN[failure], error_of())
    assert served.requests[0].authorization == f"Bearer {TOKEN}"
    assert "secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("token", ["hf_secret\u00e9", "hf_secret\x0bsecret"])
def test_a_token_that_cannot_be_sent_stays_secret_too(monkeypatch, token):
    log_in(monkeypatch, token)
    assert "your token cannot be sent to the Hub" in error_of()


def test_missing_revision_and_missing_weights(served):
    assert "apple/OpenELM-270M has no revision 'v9' (404)" in error_of(revision="v9")
    assert "has no revision" in error_of(revision="v" * 300)
    served.repos["apple/OpenELM"] = {"README.md": b"see the others"}
    assert "apple/OpenELM has no config.json with *.safetensors or pytorch_model*.bin" in error_of("apple/OpenELM")


def test_offline_by_argument_and_by_environment(served, monkeypatch):
    from huggingface_hub import constants

    expected = "apple/OpenELM-270M is not in the Hub cache and offline was asked for"
    assert expected in error_of(offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert expected in error_of()
    assert served.requests == []


def no_such_host(*args: object, **options: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_no_connection_no_such_host_and_no_answer(served, monkeypatch, tmp_path):
    served.failures[MODEL] = "slow"
    monkeypatch.setattr("openelm_mlx.hub_download._ANSWER_TIMEOUT_S", 0.1)
    messages = [error_of()]
    use_hub(monkeypatch, "http://hub.invalid", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", no_such_host)
        messages.append(error_of())
    use_hub(monkeypatch, served.url, tmp_path)
    served.stop()
    messages.append(error_of())
    assert "the Hub did not answer in time (apple/OpenELM-270M)" in messages[0]
    assert "cannot connect to the Hub (apple/OpenELM-270M: Name or service not known)" in messages[1]
    assert "cannot connect to the Hub (apple/OpenELM-270M: Connection refused)" in messages[2]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "the disk is full (model.safetensors of org/x)"),
        (errno.EACCES, "in the Hub cache (Permission denied)"),
    ],
)
def test_a_cache_that_takes_no_file(number, expected):
    wanted = Wanted("org/x", "weights", "or name a local folder", file="model.safetensors")
    assert expected in str(
        explain(OSError(number, "No space left" if number == errno.ENOSPC else "Permission denied"), wanted)
    )


def test_an_unwritable_cache(monkeypatch, tmp_path):
    from huggingface_hub import constants

    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert "in the Hub cache (Not a directory)" in error_of()


def test_a_cut_transfer_is_resumed(served, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what is kept of a cut transfer
    served.failures[MODEL] = "cut"
    with contextlib.suppress(HubError):  # the first releases of huggingface_hub resume at the next call only
        resolve_model(MODEL)
    assert (resolve_model(MODEL) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    half = len(FILES["model.safetensors"]) // 2
    assert [r.range for r in served.requests if r.range] == [f"bytes={half}-"]


def test_a_damaged_file_is_not_kept(served, tmp_path):
    """Fault C4: same length, other bytes, which the transfer alone does not notice."""
    served.failures[MODEL] = "corrupt"
    error_of()
    assert "not in the Hub cache" in error_of(offline=True)
    served.failures.clear()
    assert (resolve_model(MODEL) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
