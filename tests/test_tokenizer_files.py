"""The generated tokenizer files: every reader gets SentencePiece's ids from them, or they are not written."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from sentencepiece import sentencepiece_model_pb2
from texts import PARAGRAPHS, SPECIAL_TEXTS, TRICKY_TEXTS
from tokenizers import Tokenizer as LibraryTokenizer

from openelm_mlx.errors import TokenizerError
from openelm_mlx.hub import LLAMA_TOKENIZER_SHA256
from openelm_mlx.prompt import CHAT_TEMPLATE, encode_chat
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import write_tokenizer_files

TINY = Path(__file__).parents[1] / "openelm_mlx" / "data" / "tiny"
PLAIN_TEXTS = [*TRICKY_TEXTS, *PARAGRAPHS, "<0x41>"]
LLAMA = os.environ.get("OPENELM_LLAMA_TOKENIZER")
SOURCES = [
    pytest.param(str(TINY / "tokenizer.model"), id="tiny"),
    pytest.param(LLAMA, id="llama", marks=pytest.mark.skipif(LLAMA is None, reason="OPENELM_LLAMA_TOKENIZER not set")),
]
CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  How are you?  "}],
    [
        {"role": "user", "content": "🙂é世"},
        {"role": "assistant", "content": "Bonjour!\n"},
        {"role": "user", "content": "<|user|>\n"},
    ],
]


@pytest.fixture(scope="module", params=SOURCES)
def folder(request, tmp_path_factory) -> Path:
    """An Instruct model's folder, config included, as transformers and mlx-lm want it."""
    folder = tmp_path_factory.mktemp("instruct")
    write_tokenizer_files(Path(request.param), folder, instruct=True, max_length=2048)
    shutil.copy(TINY / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder) -> Tokenizer:
    return Tokenizer.from_path(folder)


def test_what_is_written(tmp_path):
    """Fault B13: tokenizer.model is copied byte for byte; the template is the Instruct models' alone."""
    for instruct in (True, False):
        write_tokenizer_files(TINY / "tokenizer.model", tmp_path, instruct=instruct, max_length=256)
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ]
        assert (tmp_path / "tokenizer.model").read_bytes() == (TINY / "tokenizer.model").read_bytes()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config["model_max_length"] == 256
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert config.get("chat_template") == (CHAT_TEMPLATE if instruct else None)


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_the_tokenizers_library_agrees(folder, ours, text):
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    assert library.encode(text).ids == ours.encode(text)
    assert library.decode(ours.encode(text)) == ours.decode(ours.encode(text)) == text


@pytest.mark.needs_mlx_lm
def test_transformers_and_mlx_lm_agree(folder, ours):
    from mlx_lm.tokenizer_utils import load
    from transformers import AutoTokenizer

    auto, wrapped = AutoTokenizer.from_pretrained(folder), load(folder)
    assert wrapped.eos_token_ids == ours.eos_token_ids
    for text in PLAIN_TEXTS:
        ids = ours.encode(text)
        assert auto.encode(text) == wrapped.encode(text) == ids, text
        assert auto.decode(ids, skip_special_tokens=True) == ours.decode(ids), text
        assert len(auto) == ours.vocab_size
    for chat in CHATS:
        for add_generation_prompt in (True, False):
            ids = encode_chat(ours, chat, add_generation_prompt=add_generation_prompt)
            for reader in (auto, wrapped):
                theirs = reader.apply_chat_template(
                    chat, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
                )
                assert theirs == ids


@pytest.mark.needs_mlx_lm
def test_mlx_lm_streams_with_its_sentencepiece_detokenizer(folder, ours):
    from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, load

    stream = load(folder).detokenizer
    assert type(stream) is SPMStreamingDetokenizer
    for text in PLAIN_TEXTS:
        if text.startswith(" "):  # mlx-lm takes off every leading space, not only the tokenizer's own
            continue
        stream.reset()
        for token in ours.encode(text, bos=False):
            stream.add_token(token)
        stream.finalize()
        assert stream.text == text


@pytest.mark.parametrize("text", SPECIAL_TEXTS[1:3])
def test_only_our_own_path_keeps_spelled_control_ids_as_text(folder, ours, text):
    """Fault B10: the reason why ids come from SentencePiece here. If this fails, the libraries have learnt it."""
    assert 2 in LibraryTokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert 2 not in ours.encode(text)


def _unigram(model):
    model.trainer_spec.model_type = 1


def _normalising(model):
    model.normalizer_spec.name = "nmt_nfkc"


def _no_prefix(model):
    model.normalizer_spec.add_dummy_prefix = False


def _trimming(model):
    model.normalizer_spec.remove_extra_whitespaces = True


def _suffix(model):
    model.trainer_spec.treat_whitespace_as_suffix = True


def _no_bytes(model):
    model.trainer_spec.byte_fallback = False
    for piece in model.pieces[3:259]:
        piece.type = 1


def _user_defined(model):
    model.pieces[-1].type = 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_unigram, "expected BPE;"),
        (_normalising, "expected identity normalisation;"),
        (_no_prefix, "expected a dummy prefix;"),
        (_trimming, "expected whitespace kept;"),
        (_suffix, "expected spaces escaped;"),
        (_no_bytes, "expected byte fallback;"),
        (_user_defined, "expected normal, byte and control pieces only;"),
    ],
)
def test_a_model_that_tokenizer_json_cannot_express_is_refused(tmp_path, change, expected):
    model = sentencepiece_model_pb2.ModelProto.FromString((TINY / "tokenizer.model").read_bytes())
    change(model)
    source, out = tmp_path / "other.model", tmp_path / "out"
    source.write_bytes(model.SerializeToString())
    out.mkdir()
    with pytest.raises(TokenizerError, match=expected):
        write_tokenizer_files(source, out, instruct=False, max_length=256)
    assert not list(out.iterdir())


@pytest.mark.parametrize("content", [b"", b"\xff" * 300, b'{"model": {}}'])
def test_a_damaged_model_is_refused(tmp_path, content):
    (tmp_path / "damaged.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"damaged\.model"):
        write_tokenizer_files(tmp_path / "damaged.model", tmp_path, instruct=False, max_length=256)


def test_a_missing_protobuf_is_named(tmp_path, monkeypatch):
    """Fault B3."""
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    monkeypatch.delattr("sentencepiece.sentencepiece_model_pb2", raising=False)
    with pytest.raises(TokenizerError, match="pip install protobuf"):
        write_tokenizer_files(TINY / "tokenizer.model", tmp_path, instruct=False, max_length=256)


@pytest.mark.skipif(LLAMA is None, reason="OPENELM_LLAMA_TOKENIZER not set")
def test_the_llama_tokenizer_is_known_by_its_hash():
    assert hashlib.sha256(Path(str(LLAMA)).read_bytes()).hexdigest() == LLAMA_TOKENIZER_SHA256
