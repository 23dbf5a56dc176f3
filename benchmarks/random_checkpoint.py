"""Model folders with random weights, for measuring a size without downloading it.

The same seed gives the same weights for every precision. The tokenizer is the bundled one, filled up with made-up
pieces to the model's vocabulary, so that reading it costs what reading OpenELM's own costs.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from sentencepiece import sentencepiece_model_pb2

from ..config import OpenELMConfig
from ..hub import BUNDLED_MODEL
from ..model import Model
from ..quantize import QuantizationSettings, plan
from ..tokenizer_files import write_tokenizer_files

_SEED = 0
_NORMAL_PIECE = 1  # sentencepiece_model.proto: ModelProto.SentencePiece.Type


def write_random_folder(folder: Path, config: OpenELMConfig, dtype: mx.Dtype, bits: int | None = None) -> None:
    """Write a folder that this project and mlx-lm both load; `bits` quantises as `openelm convert -q` does."""
    folder.mkdir(parents=True)
    mx.random.seed(_SEED)
    model = Model(config)
    model.set_dtype(dtype)
    raw = {**config.to_dict(), "torch_dtype": str(dtype).rpartition(".")[-1]}
    if bits is not None:
        quantization = plan(config, QuantizationSettings.of(bits=bits))
        nn.quantize(model, class_predicate=quantization.parameters_of)
        raw["quantization"] = quantization.to_config()
    weights: dict[str, Any] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(padded_tokenizer(config.vocab_size))
    write_tokenizer_files(folder / "tokenizer.model", folder, instruct=False, max_length=config.max_context_length)


def padded_tokenizer(vocab_size: int) -> bytes:
    """The bundled SentencePiece model with joined pairs of its pieces appended, the least likely of all."""
    protocol: Any = sentencepiece_model_pb2
    model = protocol.ModelProto.FromString((BUNDLED_MODEL / "tokenizer.model").read_bytes())
    known = {piece.piece for piece in model.pieces}
    words = [piece.piece for piece in model.pieces if piece.type == _NORMAL_PIECE]
    score = min(piece.score for piece in model.pieces)
    for left, right in itertools.product(words, words):
        if len(model.pieces) == vocab_size:
            break
        if "\u2581" not in right and left + right not in known:
            known.add(left + right)
            score -= 1
            model.pieces.add(piece=left + right, score=score, type=_NORMAL_PIECE)
    model.trainer_spec.vocab_size = len(model.pieces)
    return model.SerializeToString()
