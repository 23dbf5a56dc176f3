"""Uploads to a Hub on this machine: what arrives, what a dry run says, and each failure in a line of its own."""

import contextlib
import re
import shutil

import pytest
from fake_hub import TOKEN, FakeHub, one_safe_line, use_hub
from fake_hub_uploads import UploadHub

from openelm_mlx import hub_upload
from openelm_mlx.errors import CheckpointError, HubError
from openelm_mlx.hub import BUNDLED_MODEL, resolve_model
from openelm_mlx.hub_upload import check_upload, upload

# Where xet is off, huggingface_hub hands files to its HTTP client in a way that this one calls outdated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "me/OpenELM-tiny"
CARD = "---\nlibrary_name: mlx\n---\n\n# OpenELM, tiny\n"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with UploadHub({}) as fake:
        use_hub(monkeypatch, fake.url, tmp_path / "home", token=TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub's pauses between its retries
        monkeypatch.chdir(tmp_path)
        yield fake


@pytest.fixture
def folder(tmp_path):
    """A finished conversion, and what a desktop leaves in folders."""
    made = tmp_path / "mlx model"
    shutil.copytree(BUNDLED_MODEL, made)
    (made / "README.md").write_text("the source's card")
    (made / ".DS_Store").touch()
    (made / "notes").mkdir()
    (made / "notes" / "private.txt").touch()
    return made


def send(folder, repo=REPO, **options):
    return upload(folder, repo, **({"card": CARD, "dry_run": False} | options))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def expected(folder):
    sent = {name: data for name, data in contents(folder).items() if not name.startswith(".")}
    return sent | {"README.md": CARD.encode()}


def error_of(call, *arguments, **options):
    with pytest.raises(HubError) as caught:
        call(*arguments, **options)
    return one_safe_line(caught.value)


def test_what_is_uploaded_can_be_loaded(hub, folder, capsys):
    before = contents(folder)
    assert send(folder) == f"{hub.url}/{REPO}"
    assert hub.repos[REPO] == {".gitattributes": b""} | expected(folder)
    assert contents(folder) == before
    assert len(hub.commits) == 1  # nobody ever sees half a model
    size = sum(len(data) for name, data in expected(folder).items() if name != "README.md")
    said = f"uploading to {hub.url}/{REPO}: 5 files, {size / 1e6:.1f} MB\n"  # and no bars where there is no terminal
    assert capsys.readouterr() == ("", said)
    assert contents(resolve_model(REPO)) == expected(folder)


def test_the_token_goes_to_the_hub_alone(hub, folder):
    send(folder)
    asked = {request.authorization for request in hub.requests if not request.path.startswith("/storage/")}
    stored = [request.authorization for request in hub.requests if request.path.startswith("/storage/")]
    assert asked == {f"Bearer {TOKEN}"}
    assert stored == [None, None]  # model.safetensors, tokenizer.model


@pytest.mark.parametrize("private", [False, True])
def test_a_new_repository_is_public_or_private(hub, folder, private):
    send(folder, private=private)
    (asked,) = hub.made
    assert (asked["organization"], asked["name"]) == tuple(REPO.split("/"))
    assert asked.get("visibility", "private" if asked.get("private") else "public") == (
        "private" if private else "public"
    )


def test_weights_of_an_earlier_upload_do_not_stay(hub, folder, capsys):
    """A reader would take them for shards of the new model."""
    shards = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
    hub.repos[REPO] = {"model.safetensors.index.json": b"{}", "model.safetensors": b"old", "poem.txt": b"mine"} | shards
    send(folder)
    assert hub.repos[REPO] == {"poem.txt": b"mine"} | expected(folder)
    assert len(hub.commits) == 1
    removed = "model.safetensors.index.json, model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    assert f"removing the weights of an earlier upload: {removed}\n" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_sent_and_asks_nobody(hub, folder, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    send(folder, dry_run=True, private=True)
    out, err = capsys.readouterr()
    sizes = {name: len(data) for name, data in expected(folder).items()}
    assert out.startswith(f"dry run: would upload 5 files, {sum(sizes.values()):,} bytes, to {REPO} (private)\n")
    listed = dict(re.findall(r"^  (\S+) +([\d,]+) bytes$", out, re.MULTILINE))
    assert {name: int(size.replace(",", "")) for name, size in listed.items()} == sizes
    assert out.endswith(f"\nREADME.md:\n\n{CARD}\n")
    assert err == ""
    assert hub.requests == []


def test_a_folder_without_a_model(hub, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(
            CheckpointError, match=r"has no config.json with \*.safetensors: expected a converted model"
        ):
            send(folder)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "me/a--b", "../x", "me/x\n", "me/" + "x" * 200])
def test_names_that_no_repository_has(hub, folder, name):
    for call in (check_upload, lambda repo: send(folder, repo, dry_run=True)):
        assert "cannot name a repository: expected a Hub id (your-name/model-name)" in error_of(call, name)


# Before the work


def test_a_check_that_finds_nothing_wrong(hub):
    check_upload(REPO)
    assert [request.path for request in hub.requests] == ["/api/whoami-v2"]
    assert hub.repos == {}


def test_no_token_and_tokens_of_no_use(hub, monkeypatch):
    hub.role = "read"
    reading = error_of(check_upload, REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_othersecret")
    unknown = error_of(check_upload, REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret\x0bsecret")
    odd = error_of(check_upload, REPO)
    monkeypatch.setenv("HF_TOKEN", "")
    none = error_of(check_upload, REPO)
    assert f"your token may not write to {REPO} (it is for reading): make one that may, at https://" in reading
    assert f"the Hub refuses your token ({REPO}, 401): log in again" in unknown
    assert "your token cannot be sent to the Hub" in odd
    assert f"uploading to {REPO} needs a token that may write: log in (`hf auth login`)" in none
    assert all(line.endswith(", or leave --upload-repo out") for line in (reading, unknown, odd, none))


def test_offline(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "needs the Hub, but HF_HUB_OFFLINE is set: unset it" in error_of(check_upload, REPO)
    assert hub.requests == []


def test_a_hub_that_does_not_answer(hub, monkeypatch):
    monkeypatch.setattr(hub_upload, "_ANSWER_TIMEOUT_S", 0.1)
    hub.failures["whoami"] = "slow"
    assert "the Hub did not answer in time" in error_of(check_upload, REPO)
    hub.stop()
    assert "cannot connect to the Hub" in error_of(check_upload, REPO)


# Failures of the upload itself


REASONS = {
    "401": rf"the Hub refuses your token \({REPO}, 401\): log in again",
    "403": rf"your token may not write to {REPO} \(403\): make one that may, at https:\S+, or choose a namespace",
    "create 404": rf"the Hub knows no place for {REPO} \(404\): check the spelling",
    "commit 409": rf"somebody else changes {REPO} just now \(409\): run again",
    "429": rf"the Hub limits your requests \({REPO}, 429\): wait 300 s",
    "500": rf"the Hub is out of order \({REPO}, 500\): try again later",
    "preupload 503": rf"the Hub is out of order \({REPO}, 503\): try again later",
    "lfs 403": r"your token may not write to",
    "commit 500": rf"the Hub is out of order \({REPO}, 500\): try again later",
}


@pytest.mark.parametrize("failure", REASONS)
def test_each_refusal_has_its_own_line(hub, folder, capfd, failure):
    """Fault B2. Nothing is committed, and the model is still there."""
    hub.failures[REPO] = failure
    message = error_of(send, folder)
    assert re.search(REASONS[failure], message)
    assert message.endswith(
        f", the model itself is done, in {folder}; upload it later with `hf upload {REPO} '{folder}' .`"
    )
    assert hub.commits == []
    assert "secret" not in "".join(capfd.readouterr())


def test_a_card_that_the_hub_does_not_accept(hub, folder):
    assert f"does not accept the name or the model card of {REPO} (400)" in error_of(send, folder, card="---\n[\n---\n")
    assert hub.commits == []


def test_a_file_that_cannot_be_read(hub, folder, monkeypatch):
    def vanished(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", vanished)
    assert f"the upload to {REPO} failed (Permission denied): run again" in error_of(send, folder)


def test_an_upload_after_a_failure(hub, folder):
    hub.failures[REPO] = "commit 500"
    with contextlib.suppress(HubError):
        send(folder)
    hub.failures.clear()
    send(folder)
    assert hub.repos[REPO] == {".gitattributes": b""} | expected(folder)


def test_a_hub_for_reading_only_is_not_the_hub(monkeypatch, folder, tmp_path):
    """A mirror that knows no accounts."""
    with FakeHub({}) as mirror:
        use_hub(monkeypatch, mirror.url, tmp_path / "home", token=TOKEN)
        assert f"the Hub knows no place for {REPO} (404)" in error_of(check_upload, REPO)
