"""Where a tokenizer comes from: the one that is named, the model's own, LLaMA's from the Hub. Faults B1 and B2."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, one_safe_line, use_hub

from openelm_mlx import hub
from openelm_mlx.errors import HubError, TokenizerError
from openelm_mlx.hub import BUNDLED_MODEL, find_tokenizer

MODEL = "apple/OpenELM-270M"
GATED, FREE = "meta-llama/Llama-2-7b-hf", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
LLAMA = b"stands in for LLaMA's tokenizer.model"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    llama, model = {"tokenizer.model": LLAMA}, {"config.json": b"{}", "model.safetensors": b"weights"}
    with FakeHub({MODEL: model, GATED: llama | {"tokenizer.json": b"{}"}, FREE: llama}) as fake:
        use_hub(monkeypatch, fake.url, tmp_path / "home")
        monkeypatch.setattr(hub, "LLAMA_TOKENIZER_SHA256", hashlib.sha256(LLAMA).hexdigest())
        monkeypatch.chdir(tmp_path)
        yield fake


def tokenizer(
    explicit: str | None = None, source: Path | None = None, vocab_size: int = 32000, **options: bool
) -> Path:
    return find_tokenizer(explicit, source, vocab_size=vocab_size, **options)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_explicit_tokenizer_wins_then_the_sources_own(served, tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, name in ((model, "tokenizer.model"), (other, "tokenizer.json")):
        folder.mkdir()
        (folder / name).touch()
    (model / "checkpoint.pt").touch()
    file = other / "tokenizer.json"
    assert tokenizer(str(file), model) == file
    assert tokenizer(str(other), model) == other
    assert tokenizer(None, model) == model == tokenizer(None, model / "checkpoint.pt") == tokenizer(None, model, 99)
    assert tokenizer("tiny") == BUNDLED_MODEL
    assert served.requests == []


def test_an_explicit_hub_id(served):
    served.repos["org/other"] = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "model.safetensors": b"large"}
    assert files(tokenizer("org/other")) == {"tokenizer.json", "tokenizer_config.json"}
    served.stop()
    assert files(tokenizer("org/other")) == {"tokenizer.json", "tokenizer_config.json"}


def test_an_explicit_tokenizer_that_is_none(served, tmp_path):
    with pytest.raises(TokenizerError, match=r"this folder has no tokenizer.model or tokenizer.json"):
        tokenizer(str(tmp_path))
    with pytest.raises(TokenizerError, match=r"--tokenizer 'llama' is neither a file or folder here nor a Hub id"):
        tokenizer("llama")
    with pytest.raises(HubError, match=r"apple/OpenELM-270M has no tokenizer.model or tokenizer.json, or pass"):
        tokenizer(MODEL)


def test_another_vocabulary_gets_no_llama_tokenizer(served):
    """Fault B1: it says which file is missing and what takes it."""
    with pytest.raises(TokenizerError, match=r"no tokenizer.model or tokenizer.json .* 4096 .* --tokenizer FILE\|DIR"):
        tokenizer(vocab_size=4096)
    assert served.requests == []


def test_without_a_token_the_free_copy_is_taken(served, capsys):
    path = tokenizer()
    assert path.read_bytes() == LLAMA
    err = capsys.readouterr().err
    assert FREE in err
    assert "Meta's licence" in err
    assert not any(GATED in request.path for request in served.requests)
    served.stop()
    assert tokenizer() == path == tokenizer(offline=True)
    assert capsys.readouterr().err.count("\n") == 2  # the licence holds for the cached file too


def test_with_a_token_metas_own_is_taken(served, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert tokenizer().read_bytes() == LLAMA
    assert served.downloads() == ["tokenizer.model"]
    assert f"from {GATED}, under Meta's licence" in capsys.readouterr().err


@pytest.mark.parametrize("failure", ["gated", "403", "404"])
def test_refused_by_meta_the_free_copy_is_taken(served, monkeypatch, capsys, failure):
    """Fault B2."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served.failures[GATED] = failure
    assert tokenizer().read_bytes() == LLAMA
    err = capsys.readouterr().err
    assert f"; trying {FREE}\n" in err
    assert f"from {FREE}, under Meta's licence" in err
    assert "secret" not in err


def test_no_tokenizer_four_reasons_four_lines(served, monkeypatch):
    """Fault B2: 401, 403, 404 and offline."""
    messages = []
    for failure in ("gated", "403", "404", "offline"):
        if failure == "404":
            monkeypatch.setenv("HF_TOKEN", TOKEN)
            served.failures[GATED] = failure
        served.failures[FREE] = failure
        with pytest.raises(HubError, match=r"or pass --tokenizer FILE \(LLaMA's tokenizer.model\)") as caught:
            tokenizer(offline=failure == "offline")
        messages.append(one_safe_line(caught.value))
    assert len(set(messages)) == 4
    assert all(FREE in message for message in messages)


def test_a_file_that_is_not_llamas_is_refused_and_dropped(served):
    served.repos[FREE] = {"tokenizer.model": b"somebody else's"}
    with pytest.raises(TokenizerError, match=r"TinyLlama.* not LLaMA's \(SHA-256 .*refused, or pass --tokenizer FILE"):
        tokenizer()
    served.repos[FREE] = {"tokenizer.model": LLAMA}
    assert tokenizer().read_bytes() == LLAMA


def test_offline_only_the_cache_serves(served, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"tokenizer.model of TinyLlama.* is not in the Hub cache and offline was asked"):
        tokenizer()
    assert served.requests == []
