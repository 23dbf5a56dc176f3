"""The tokenizer inside a GGUF file: SentencePiece's pieces, scores and types, and the chat template.

llama.cpp then encodes as SentencePiece does: a space in front of a text and after each special token, BOS once.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from ..tokenizer_files import read_llama_like

if TYPE_CHECKING:
    from gguf import GGUFWriter

_PADDING_TYPE, _PADDING_SCORE = 5, -10000.0  # "unused": never produced by a text, as llama.cpp's converter marks them


def sentencepiece_file(tokenizer: Path) -> Path:
    """The tokenizer.model at a path that may be a folder. Raises TokenizerError where there is none."""
    file = tokenizer / "tokenizer.model" if tokenizer.is_dir() else tokenizer
    if not file.is_file() or file.suffix == ".json":
        raise TokenizerError(
            f"{tokenizer} has no tokenizer.model, whose scores GGUF needs (a tokenizer.json lacks them); "
            "name it with --tokenizer FILE"
        )
    return file


def add_tokenizer(writer: "GGUFWriter", file: Path, rows: int, chat_template: str | None) -> None:
    """Put a tokenizer.model into a GGUF of a model whose embedding has `rows` rows; padding rows get unused names."""
    model, _ = read_llama_like(file)
    tokens = [piece.piece.encode() for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    types = [int(piece.type) for piece in model.pieces]  # SentencePiece's numbers are GGUF's
    padding = rows - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + [f"[PAD{i}]".encode() for i in range(padding)])
    writer.add_token_scores(scores + [_PADDING_SCORE] * padding)
    writer.add_token_types(types + [_PADDING_TYPE] * padding)
    trainer = model.trainer_spec
    writer.add_bos_token_id(trainer.bos_id)
    writer.add_eos_token_id(trainer.eos_id)
    writer.add_unk_token_id(trainer.unk_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
