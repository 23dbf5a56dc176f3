"""`tokenizer.model` -> the tokenizer files of a model folder, with which every reader gets the training ids.

`tokenizer.model` is copied byte for byte, and `tokenizer.json` and `tokenizer_config.json` are made from it: a
`tokenizer.json` found beside a checkpoint may be the variant that drops the space after `</s>`. transformers,
mlx-lm and the `tokenizers` library read the two; our own `Tokenizer` reads `tokenizer.model`.
"""

import json
from pathlib import Path
from typing import Any

from .detokenizer import SPACE
from .errors import TokenizerError
from .prompt import CHAT_TEMPLATE
from .tokenizer import read_sentencepiece

# sentencepiece_model.proto: TrainerSpec.ModelType and ModelProto.SentencePiece.Type
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def write_tokenizer_files(model_file: Path, out: Path, *, instruct: bool, max_length: int) -> None:
    """Write the three files into the folder `out`; `instruct` adds the chat template, `max_length` is the context.

    Raises TokenizerError when `model_file` is no SentencePiece model, or one that `tokenizer.json` cannot express.
    """
    model, data = read_llama_like(model_file)
    (out / "tokenizer.model").write_bytes(data)
    _write_json(out / "tokenizer.json", _tokenizer_json(model))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(model, instruct, max_length), indent=1)


def read_llama_like(file: Path) -> tuple[Any, bytes]:
    """The ModelProto of a `tokenizer.model` and its bytes. Raises TokenizerError unless it has LLaMA's settings."""
    model, data = _read(file)
    _check_expressible(file, model)
    return model, data


def _read(file: Path) -> tuple[Any, bytes]:
    """The SentencePiece ModelProto and its bytes. Settings and scores are not in the library's own interface."""
    _, data = read_sentencepiece(file)  # refuses what cannot be parsed
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise TokenizerError(f"{file} needs the protobuf package; pip install protobuf") from None
    protocol: Any = sentencepiece_model_pb2
    return protocol.ModelProto.FromString(data), data


def _check_expressible(file: Path, model: Any) -> None:
    """`tokenizer.json`, and llama.cpp, are right only for a model trained with LLaMA's settings."""
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    requirements = {
        "BPE": trainer.model_type == _BPE,
        "identity normalisation": normalizer.name == "identity" and not normalizer.precompiled_charsmap,
        "a dummy prefix": normalizer.add_dummy_prefix,
        "whitespace kept": not normalizer.remove_extra_whitespaces,
        "spaces escaped": normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix,
        "byte fallback": trainer.byte_fallback,
        "normal, byte and control pieces only": {piece.type for piece in model.pieces}
        <= {_NORMAL, _UNKNOWN, _CONTROL, _BYTE},
        "<unk>, <s> and </s>": all(
            0 <= i < len(model.pieces) for i in (trainer.unk_id, trainer.bos_id, trainer.eos_id)
        ),
    }
    lacking = [name for name, met in requirements.items() if not met]
    if lacking:
        raise TokenizerError(
            f"{file} was not trained with LLaMA's settings; expected {', '.join(lacking)}; "
            "name OpenELM's own tokenizer with --tokenizer FILE|DIR|HUB_ID"
        )


def _tokenizer_json(model: Any) -> dict[str, Any]:
    bos, unknown = (model.pieces[i].piece for i in (model.trainer_spec.bos_id, model.trainer_spec.unk_id))
    first_bos, second_bos = ({"SpecialToken": {"id": bos, "type_id": i}} for i in (0, 1))
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    space = {"String": SPACE}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **token} for i, token in _special_tokens(model).items()],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first_bos, first],
            "pair": [first_bos, first, second_bos, second],
            "special_tokens": {bos: {"id": bos, "ids": [model.trainer_spec.bos_id], "tokens": [bos]}},
        },
        # mlx-lm takes its SentencePiece detokenizer for exactly this sequence, and a quadratic one otherwise.
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": space, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.piece: i for i, piece in enumerate(model.pieces)},
            "merges": _merges(model),
        },
    }


def _merges(model: Any) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, in the order in which SentencePiece would choose them.

    SentencePiece joins the pair whose result scores best and has no list of merges; pieces of equal score rank by id.
    """
    scored = [(-piece.score, i, piece.piece) for i, piece in enumerate(model.pieces) if piece.type == _NORMAL]
    scored.sort()
    known = {piece for *_, piece in scored}
    return [
        (left, right)
        for *_, piece in scored
        for k in range(1, len(piece))
        if (left := piece[:k]) in known and (right := piece[k:]) in known
    ]


def _tokenizer_config(model: Any, instruct: bool, max_length: int) -> dict[str, Any]:
    trainer = model.trainer_spec
    config: dict[str, Any] = {
        # Not LlamaTokenizer: transformers 5 rebuilds that with another prefix rule, and the ids of every chat change.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": model.pieces[trainer.bos_id].piece,
        "eos_token": model.pieces[trainer.eos_id].piece,
        "unk_token": model.pieces[trainer.unk_id].piece,
        "pad_token": None,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "added_tokens_decoder": {str(i): token for i, token in _special_tokens(model).items()},
    }
    return config | ({"chat_template": CHAT_TEMPLATE} if instruct else {})


def _special_tokens(model: Any) -> dict[int, dict[str, Any]]:
    """id -> the description that transformers wants of <unk>, <s> and </s>."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        i: {"content": piece.piece, **flags}
        for i, piece in enumerate(model.pieces)
        if piece.type in (_UNKNOWN, _CONTROL)
    }


def _write_json(path: Path, value: dict[str, Any], indent: int | None = None) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
