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
import numpy as np
from mlx.utils import tree_flatten
from sentencepiece import sentencepiece_model_pb2

from ..config import OpenELMConfig
from ..hub import BUNDLED_MODEL
from ..model import Model
from ..quantize import QuantizationSettings, plan
from ..safetensors_writer import PlannedTensor, SafetensorsWriter
from ..tensors import CODES, from_mlx
from ..tokenizer_files import write_tokenizer_files

_SEED = 0
_BLOCK_VALUES = 1 << 20
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
    _write_config_and_tokenizer(folder, config, raw)


def write_random_shards(folder: Path, config: OpenELMConfig, dtype: str) -> None:
    """The same kind of folder of any size with a few megabytes of memory: in row blocks, and in shards of 5 GB."""
    folder.mkdir(parents=True)
    plan = [PlannedTensor(name, CODES[dtype], shape) for name, shape in config.parameter_shapes().items()]
    rng = np.random.default_rng(_SEED)
    with SafetensorsWriter(folder, plan) as writer:
        for tensor in plan:
            width = tensor.shape[-1]
            rows = max(1, _BLOCK_VALUES // width)
            for start in range(0, tensor.shape[0], rows):
                shape = (min(rows, tensor.shape[0] - start), *tensor.shape[1:])
                writer.append(tensor.name, _random_rows(rng, shape, dtype))
    _write_config_and_tokenizer(folder, config, {**config.to_dict(), "torch_dtype": dtype})


def _random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Weights that keep activations of a size; norms of about one."""
    values = mx.array(rng.standard_normal(shape, np.float32))
    values = values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + values / 10
    return from_mlx(values.astype(getattr(mx, dtype)))


def _write_config_and_tokenizer(folder: Path, config: OpenELMConfig, raw: dict[str, Any]) -> None:
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
