"""Token ids against SentencePiece itself, and the stream of text against the text decoded at once, in both backends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from texts import PARAGRAPHS, SPECIAL_TEXTS, TRICKY_TEXTS
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from openelm_mlx.detokenizer import StreamingDetokenizer
from openelm_mlx.errors import TokenizerError
from openelm_mlx.tokenizer import Tokenizer, check_ids
from openelm_mlx.tokenizer_files import write_tokenizer_files

TINY = Path(__file__).parents[1] / "openelm_mlx" / "data" / "tiny"
PROCESSOR = SentencePieceProcessor(model_file=str(TINY / "tokenizer.model"))
VOCAB = PROCESSOR.vocab_size()
SMILE = [3 + byte for byte in "🙂".encode()]  # byte pieces start at id 3

# Mostly byte pieces, so that characters form, break off and go wrong; control ids and words in between.
ids_lists = st.lists(st.integers(131, 258) | st.integers(0, 258) | st.integers(0, VOCAB - 1), max_size=24)
texts = st.text(max_size=60) | st.lists(st.sampled_from([*SPECIAL_TEXTS, *TRICKY_TEXTS]), max_size=4).map("".join)


@pytest.fixture(scope="module")
def json_folder(tmp_path_factory) -> Path:
    """A folder as mlx_lm.convert leaves it: without tokenizer.model."""
    folder = tmp_path_factory.mktemp("json")
    write_tokenizer_files(TINY / "tokenizer.model", folder, instruct=False, max_length=256)
    (folder / "tokenizer.model").unlink()
    return folder


@pytest.fixture(scope="module", params=["sentencepiece", "tokenizers"])
def tokenizer(request, json_folder) -> Tokenizer:
    return Tokenizer.from_path(TINY if request.param == "sentencepiece" else json_folder)


def streamed(stream: StreamingDetokenizer, ids: list[int]) -> list[str]:
    return [*(stream.add(token) for token in ids), stream.finish()]


# Encoding


@given(text=texts)
@example(text="".join(PARAGRAPHS))
def test_ids_are_sentencepieces_with_one_bos(tokenizer, text):
    """Faults B6, B10: whatever a text spells, its ids hold one BOS, in front, and no other control id."""
    assert tokenizer.encode(text) == [1, *PROCESSOR.encode(text)]
    assert tokenizer.encode(text, bos=False) == tokenizer.encode_segment(text) == PROCESSOR.encode(text)
    assert not {0, 1, 2} & set(tokenizer.encode_segment(text))


@pytest.mark.parametrize("text", SPECIAL_TEXTS)
def test_spelled_control_ids_stay_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).count(2) == 0


@given(text=texts)
def test_a_tokenizer_json_with_another_prefix_rule_gives_the_training_ids(metaspace, text):
    """Newer transformers re-save the file with a rule that shifts pieces; only its vocabulary is used."""
    assert metaspace.encode_segment(text) == PROCESSOR.encode(text)


@pytest.fixture(scope="module")
def metaspace(json_folder, tmp_path_factory) -> Tokenizer:
    library = LibraryTokenizer.from_file(str(json_folder / "tokenizer.json"))
    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    assert library.encode(" x", add_special_tokens=False).ids != PROCESSOR.encode(" x")  # the rule does differ
    file = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    library.save(str(file))
    return Tokenizer.from_path(file)


def test_text_that_is_not_unicode_is_refused(tokenizer):
    with pytest.raises(TokenizerError, match=r"not Unicode.*character 2"):
        tokenizer.encode("ab\udcff")


def test_properties(tokenizer):
    assert tokenizer.vocab_size == VOCAB
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.eos_token_ids == {2}
    tokenizer.eos_token_ids.add(7)
    assert tokenizer.eos_token_ids == {2}


# Decoding


@given(ids=ids_lists)
@example(ids=[1, 2, 0, 2])
@example(ids=[3 + 0xC3, 1, 3 + 0xA9])  # a control id between the two bytes of é
@example(ids=[3 + 0x20, *PROCESSOR.encode("a")])  # a leading space that is no dummy prefix
@example(ids=[3 + byte for byte in "▁".encode()])
def test_decode_is_sentencepieces(tokenizer, ids):
    assert tokenizer.decode(ids) == PROCESSOR.decode(ids)


@given(ids=ids_lists, continuation=st.booleans())
def test_the_joined_stream_is_the_whole_text(tokenizer, ids, continuation):
    """Faults D1, D2: for any ids, broken characters included."""
    pieces = streamed(tokenizer.detokenizer(continuation=continuation), ids)
    assert "".join(pieces) == tokenizer.decode(ids, continuation=continuation)


@given(text=texts.filter(lambda text: "▁" not in text))
def test_decode_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=texts, cut=st.integers(1, 30))
def test_a_continuation_follows_its_prompt(tokenizer, text, cut):
    """The leading space of a continuation is a real one: prompt + continuation is the whole."""
    ids = PROCESSOR.encode(text)
    head, tail = ids[:cut], ids[cut:]
    if not head or 3 <= head[-1] < 259:  # a byte piece: the cut may run through a character
        return
    assert tokenizer.decode(head) + tokenizer.decode(tail, continuation=True) == tokenizer.decode(ids)


def test_generation_keeps_the_first_space_by_default(tokenizer):
    ids = tokenizer.encode_segment("there was a cat")
    assert "".join(streamed(tokenizer.detokenizer(), ids)) == " there was a cat"
    assert tokenizer.decode(ids) == "there was a cat"


@pytest.mark.parametrize("size", range(1, 9))
def test_no_space_is_lost_at_chunk_borders(tokenizer, size):
    """Fault D2: text shown every `size` tokens."""
    ids = tokenizer.encode("once upon a time there was a cat")
    pieces = streamed(tokenizer.detokenizer(continuation=False), ids)
    chunks = ["".join(pieces[start : start + size]) for start in range(0, len(pieces), size)]
    assert "".join(chunks) == "once upon a time there was a cat"
    assert all(pieces[1:-1])  # a whole word is never held back


def test_half_a_character_is_held_back_until_it_is_whole(tokenizer):
    """Fault D1."""
    stream = tokenizer.detokenizer()
    assert [stream.add(token) for token in SMILE] == ["", "", "", "🙂"]
    assert stream.finish() == ""


def test_half_a_character_is_given_up_when_it_cannot_become_whole(tokenizer):
    """Fault D1: broken off by text, by a control id, by the end, or impossible from its second byte."""
    (word,) = [token for token in PROCESSOR.encode("the") if PROCESSOR.id_to_piece(token) == "▁the"]
    assert streamed(tokenizer.detokenizer(), [*SMILE[:2], word]) == ["", "", "\ufffd\ufffd the", ""]
    assert streamed(tokenizer.detokenizer(), [*SMILE[:3], 2]) == ["", "", "", "\ufffd\ufffd\ufffd", ""]
    assert streamed(tokenizer.detokenizer(), SMILE[:3]) == ["", "", "", "\ufffd\ufffd\ufffd"]
    assert streamed(tokenizer.detokenizer(), [3 + 0xE0, 3 + 0x80]) == ["", "\ufffd\ufffd", ""]


def test_each_token_costs_the_same(tokenizer):
    """Nothing is decoded twice: one look at the vocabulary for each token."""

    class Counted(list):
        looks = 0

        def __getitem__(self, index):
            Counted.looks += 1
            return super().__getitem__(index)

    stream = StreamingDetokenizer(Counted(tokenizer._pieces), continuation=False)
    ids = tokenizer.encode(" ".join(PARAGRAPHS * 5))
    streamed(stream, ids)
    assert Counted.looks == len(ids)


# Ids and vocabularies


@pytest.mark.parametrize(("ids", "named"), [([5, -1], "-1 at position 1"), ([4096], "4096 at position 0")])
def test_ids_outside_the_vocabulary_are_named(tokenizer, ids, named):
    """MLX reads foreign memory for such an id."""
    for refuse in (lambda: check_ids(ids, VOCAB), lambda: tokenizer.decode(ids)):
        with pytest.raises(TokenizerError, match=rf"token id {named} is outside the vocabulary 0\.\.4095"):
            refuse()
    with pytest.raises(TokenizerError, match=r"vocabulary 0\.\.4095"):
        tokenizer.detokenizer().add(ids[-1])


def test_check_ids_wants_integers():
    check_ids([0, VOCAB - 1], VOCAB)
    with pytest.raises(TokenizerError, match=r"1\.5 at position 2 is not an integer"):
        check_ids([0, 1, 1.5], VOCAB)


def test_a_tokenizer_larger_than_the_model_is_refused(json_folder):
    for path in (TINY, json_folder):
        assert Tokenizer.from_path(path, vocab_size=VOCAB).vocab_size == VOCAB
        with pytest.raises(TokenizerError, match=r"has 4096 pieces, the model's vocabulary only 4095.*--tokenizer"):
            Tokenizer.from_path(path, vocab_size=VOCAB - 1)


def test_the_padded_rows_of_a_model_decode_as_unknown(json_folder):
    """CoreNet pads the vocabulary to a multiple of 128: an untrained row may be sampled, and must not end the run."""
    for path in (TINY, json_folder):
        tokenizer = Tokenizer.from_path(path, vocab_size=VOCAB + 128)
        assert tokenizer.vocab_size == VOCAB
        assert tokenizer.decode([VOCAB + 127]) == tokenizer.decode([0]) == " ⁇ "
        with pytest.raises(TokenizerError, match="4224 at position 0"):
            tokenizer.decode([VOCAB + 128])


# Files


def test_tokenizer_model_wins_over_tokenizer_json(tmp_path):
    shutil.copy(TINY / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Tokenizer.from_path(tmp_path).encode("a") == Tokenizer.from_path(TINY / "tokenizer.model").encode("a")


@pytest.mark.parametrize("name", ["", "absent"])
def test_without_a_tokenizer_the_message_says_what_is_needed(tmp_path, name):
    """Fault B1."""
    with pytest.raises(TokenizerError, match=r"tokenizer\.model.*gated.*--tokenizer FILE\|DIR\|HUB_ID") as caught:
        Tokenizer.from_path(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("file", "package"), [("tokenizer.model", "sentencepiece"), ("tokenizer.json", "tokenizers")])
def test_a_missing_library_is_named(tmp_path, json_folder, monkeypatch, file, package):
    """Fault B3."""
    shutil.copy((TINY if package == "sentencepiece" else json_folder) / file, tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TokenizerError, match=f"{file} needs the {package} package; pip install {package}"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "pointer", "noise", "other"])
def test_a_damaged_file_is_one_line(tmp_path, json_folder, name, damage):
    whole = ((TINY if name == "tokenizer.model" else json_folder) / name).read_bytes()
    (tmp_path / name).write_bytes(
        {
            "empty": b"",
            "truncated": whole[:-2000],
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "noise": b"\xff" * 300,
            "other": b'{"a": [1]}',
        }[damage]
    )
    with pytest.raises(TokenizerError, match=name) as caught:
        Tokenizer.from_path(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path):
    byte_level = LibraryTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    byte_level.decoder = decoders.ByteLevel()
    byte_level.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="not a tokenizer of LLaMA's kind"):
        Tokenizer.from_path(tmp_path)
    LibraryTokenizer(models.BPE(vocab={"a": 0}, merges=[], byte_fallback=True)).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="has no <s> and no </s> and no <unk>"):
        Tokenizer.from_path(tmp_path)


def test_added_tokens_of_a_tokenizer_json(json_folder, tmp_path):
    library = LibraryTokenizer.from_file(str(json_folder / "tokenizer.json"))
    library.add_special_tokens(["<pad>"])
    library.add_tokens(["zyzzyva"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.vocab_size == VOCAB + 2
    assert tokenizer.decode([VOCAB, VOCAB + 1]) == "zyzzyva"


def test_reading_text_imports_only_what_it_needs():
    code = (
        "import sys; from pathlib import Path; from openelm_mlx.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_path(Path({str(TINY)!r})); t.decode(t.encode('a'))\n"
        "print(sorted({'tokenizers', 'transformers', 'mlx', 'mlx_lm', 'torch', 'google.protobuf'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif("OPENELM_LLAMA_TOKENIZER" not in os.environ, reason="OPENELM_LLAMA_TOKENIZER names no file")
def test_the_llama_tokenizer():
    tokenizer = Tokenizer.from_path(Path(os.environ["OPENELM_LLAMA_TOKENIZER"]), vocab_size=32128)
    assert tokenizer.vocab_size == 32000
    assert tokenizer.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    with pytest.raises(TokenizerError, match="another model's"):
        Tokenizer.from_path(Path(os.environ["OPENELM_LLAMA_TOKENIZER"]), vocab_size=VOCAB)
