"""Text to token ids and back, exactly as in OpenELM's training: BOS once, and no user text ever becomes a control id.

The ids are SentencePiece's. A folder that has lost its `tokenizer.model` (mlx_lm.convert leaves it behind) is read
through the `tokenizers` library, of which only the BPE model is used: SentencePiece's rule, a space in front and
"▁" for spaces, is applied here. That keeps "</s>" in a text from being read as the end of the text, and gives the
training ids also from those `tokenizer.json` variants whose own rule differs.

    tokenizer = Tokenizer.from_path(Path("OpenELM-270M"))
    tokenizer.encode("Once upon a time")      # [1, 9038, 2501, 263, 931]
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .detokenizer import SPACE, Piece, StreamingDetokenizer
from .errors import TokenizerError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
UNKNOWN_TEXT = " \u2047 "  # what SentencePiece prints for <unk>
_BYTES: dict[str, Piece] = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}
HOW_TO_GET_ONE = (
    "OpenELM uses Llama 2's tokenizer.model, which Apple's repositories do not include and which is gated "
    "(accept the licence of meta-llama/Llama-2-7b-hf); name a copy with --tokenizer FILE|DIR|HUB_ID"
)


class Tokenizer:
    """A vocabulary, and the way from text to its ids. Make one with `Tokenizer.from_path`."""

    is_instruct = False  # whether prompts take the Instruct form: the loader says so, ids alone cannot tell

    def __init__(
        self,
        encode_text: Callable[[str], list[int]],
        load_pieces: Callable[[], list[Piece]],
        *,
        vocab_size: int,
        special_ids: tuple[int, int, int],
    ) -> None:
        self._encode_text = encode_text
        self._load_pieces = load_pieces
        self._model_vocab_size = vocab_size
        self._vocab_size = vocab_size
        self._bos, self._eos, self._unk = special_ids

    @classmethod
    def from_path(cls, path: Path, *, vocab_size: int | None = None) -> "Tokenizer":
        """From a `tokenizer.model` or `tokenizer.json`, or a folder with one (`tokenizer.model` wins).

        `vocab_size` is the model's: a tokenizer with more pieces is refused, as its ids have no row in the embedding;
        rows beyond the tokenizer's (CoreNet pads 32000 to 32128) decode as unknown. Raises TokenizerError.
        """
        file = _find_file(path)
        tokenizer = _from_tokenizer_json(file) if file.suffix == ".json" else _from_sentencepiece(file)
        if vocab_size is not None:
            if tokenizer.vocab_size > vocab_size:
                raise TokenizerError(
                    f"{file} has {tokenizer.vocab_size} pieces, the model's vocabulary only {vocab_size}: "
                    "it is another model's; name the right one with --tokenizer FILE|DIR|HUB_ID"
                )
            tokenizer._model_vocab_size = vocab_size
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer knows; a model may have more rows than that."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int:
        return self._bos

    @property
    def eos_token_id(self) -> int:
        return self._eos

    @property
    def eos_token_ids(self) -> set[int]:
        """The ids that end a text, as a set of its own for every caller (mlx-lm's name)."""
        return {self._eos}

    @property
    def unk_token_id(self) -> int:
        return self._unk

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """The ids of a whole text: BOS once, whatever the text begins with, and no EOS."""
        return [self._bos, *self.encode_segment(text)] if bos else self.encode_segment(text)

    def encode_segment(self, text: str) -> list[int]:
        """The ids of text alone, without BOS or EOS: what stands between special ids in a prompt."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text is not Unicode: {text[error.start]!r} at character {error.start}; read it as UTF-8"
            ) from None
        return self._encode_text(text)

    def decode(self, ids: Sequence[int], *, continuation: bool = False) -> str:
        """The text of all ids; BOS and EOS print nothing, <unk> prints SentencePiece's " ⁇ ".

        Every text is encoded with a space in front, which decoding takes off; `continuation` keeps it, for ids
        that follow other ids. Raises TokenizerError for an id outside the vocabulary.
        """
        check_ids(ids, len(self._pieces))
        stream = self.detokenizer(continuation=continuation)
        return "".join([stream.add(token) for token in ids]) + stream.finish()

    def piece(self, token: int) -> str:
        """One id as a vocabulary writes it, to look at: "▁once", "<0x0A>", "</s>". Raises TokenizerError."""
        check_ids([token], len(self._pieces))
        names = {self._bos: BOS, self._eos: EOS, self._unk: UNKNOWN}
        piece = names.get(token, self._pieces[token])
        return f"<0x{piece[0]:02X}>" if isinstance(piece, bytes) else piece

    def detokenizer(self, *, continuation: bool = True) -> StreamingDetokenizer:
        """A fresh stream of text. Generation continues a prompt, so the first piece keeps its space (see `decode`)."""
        return StreamingDetokenizer(self._pieces, continuation=continuation)

    @cached_property
    def _pieces(self) -> list[Piece]:
        pieces = self._load_pieces()
        return pieces + [UNKNOWN_TEXT] * (self._model_vocab_size - len(pieces))


def check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Raise TokenizerError unless every id has a row among `vocab_size`.

    MLX checks no index: an id beyond the embedding reads foreign memory, or ends the process.
    """
    for position, token in enumerate(ids):
        try:
            known = 0 <= operator.index(token) < vocab_size
        except TypeError:
            raise TokenizerError(f"token id {token!r} at position {position} is not an integer") from None
        if not known:
            raise TokenizerError(
                f"token id {token} at position {position} is outside the vocabulary 0..{vocab_size - 1}; "
                "encode the text with this model's own tokenizer"
            )


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise TokenizerError(f"{path}: no such tokenizer file or folder; {HOW_TO_GET_ONE}")
    for name in ("tokenizer.model", "tokenizer.json"):
        if (path / name).is_file():
            return path / name
    raise TokenizerError(f"{path} has neither tokenizer.model nor tokenizer.json; {HOW_TO_GET_ONE}")


def _read_bytes(file: Path) -> bytes:
    """The bytes of a tokenizer file. Raises TokenizerError when there are none, or only a pointer to them."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error.strerror}") from None
    if data.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{file} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    if not data:
        raise TokenizerError(f"{file} is empty: an incomplete download; fetch it again")
    return data


def read_sentencepiece(file: Path) -> tuple["SentencePieceProcessor", bytes]:
    """A `tokenizer.model` and its bytes. Raises TokenizerError when it is damaged or the library is missing."""
    data = _read_bytes(file)
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise TokenizerError(f"{file} needs the sentencepiece package; pip install sentencepiece") from None
    try:
        return SentencePieceProcessor(model_proto=data), data
    except (RuntimeError, ValueError):
        raise TokenizerError(f"{file} is not a SentencePiece model, or is damaged; fetch it again") from None


def _from_sentencepiece(file: Path) -> Tokenizer:
    processor, _ = read_sentencepiece(file)
    special_ids = _special_ids(file, (processor.bos_id(), processor.eos_id(), processor.unk_id()))
    vocab_size = processor.vocab_size()

    def load_pieces() -> list[Piece]:
        ids = list(range(vocab_size))
        kinds = zip(processor.id_to_piece(ids), processor.is_byte(ids), processor.is_control(ids), strict=True)
        pieces = [_BYTES[piece] if byte else "" if control else piece for piece, byte, control in kinds]
        pieces[special_ids[2]] = processor.decode([special_ids[2]])
        return pieces

    return Tokenizer(processor.encode, load_pieces, vocab_size=vocab_size, special_ids=special_ids)


def _from_tokenizer_json(file: Path) -> Tokenizer:
    data = _read_bytes(file)
    try:
        import tokenizers
    except ImportError:
        raise TokenizerError(f"{file} needs the tokenizers package; pip install tokenizers") from None
    try:
        library = tokenizers.Tokenizer.from_buffer(data)
    except ValueError as error:
        raise TokenizerError(f"{file} cannot be read by the tokenizers library: {error}") from None
    model = library.model
    if not (isinstance(model, tokenizers.models.BPE) and model.byte_fallback):
        raise TokenizerError(f"{file} is not a tokenizer of LLaMA's kind (BPE with byte fallback); {HOW_TO_GET_ONE}")
    vocabulary = library.get_vocab(with_added_tokens=True)
    vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode_text(text: str) -> list[int]:
        return [token.id for token in model.tokenize(SPACE + text.replace(" ", SPACE))] if text else []

    def load_pieces() -> list[Piece]:
        pieces: list[Piece] = [UNKNOWN_TEXT] * vocab_size  # for ids that no piece has
        for piece, i in vocabulary.items():
            pieces[i] = _BYTES.get(piece, piece)
        for i, added in library.get_added_tokens_decoder().items():
            pieces[i] = "" if added.special else added.content
        pieces[vocabulary[UNKNOWN]] = UNKNOWN_TEXT
        return pieces

    special_ids = _special_ids(file, (vocabulary.get(BOS, -1), vocabulary.get(EOS, -1), vocabulary.get(UNKNOWN, -1)))
    return Tokenizer(encode_text, load_pieces, vocab_size=vocab_size, special_ids=special_ids)


def _special_ids(file: Path, ids: tuple[int, int, int]) -> tuple[int, int, int]:
    missing = [name for name, i in zip((BOS, EOS, UNKNOWN), ids, strict=True) if i < 0]
    if missing:
        raise TokenizerError(f"{file} has no {' and no '.join(missing)}: not a tokenizer of LLaMA's kind")
    return ids
