"""A model folder in, a model and its tokenizer out. Weights stay in their file until the first token needs them.

Reads what `openelm convert` and mlx_lm.convert write, and a Hub folder as it is: parameter names are the Hub's. Strict
both ways: every tensor is expected, and every expected tensor is there with its shape.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from . import device
from .config import OpenELMConfig, read_json_object
from .errors import CheckpointError, GenerationError
from .hub import find_tokenizer, resolve_model
from .model import Model
from .quantize import Quantization, detect, logical_shapes
from .safetensors_file import read_folder, weight_files
from .tensors import FLOATING, StoredTensor, mlx_name
from .tokenizer import Tokenizer

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_FLOAT32_BYTES = 4
_log = logging.getLogger(__package__)


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    adapter_path: str | Path | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    keep_quantized: bool = False,
) -> tuple[Model, Tokenizer]:
    """A model by folder, Hub id or `tiny`, ready to generate, and its tokenizer.

    dtype: `auto` is the folder's own dtype and quantisation on Metal; on a CPU it is float32, dequantised, where the
    memory is there, which is 2.5 times faster. An explicit dtype changes unquantised weights only.
    tokenizer: a file, folder or Hub id, where the model's own folder has none.
    Raises an OpenELMError (Config-, Checkpoint-, Tokenizer- or HubError) with one line saying what to do.
    """
    name = str(path_or_hub_id)
    folder = resolve_model(name, revision=revision, offline=offline)
    model = load_model(folder, dtype=dtype, keep_quantized=keep_quantized)
    vocab_size = model.config.vocab_size
    found = find_tokenizer(tokenizer, folder, vocab_size=vocab_size, offline=offline)
    loaded = Tokenizer.from_path(found, vocab_size=vocab_size)
    loaded.is_instruct = is_instruct(name, folder)
    if adapter_path is not None:
        from .adapters import load_adapters

        load_adapters(model, Path(adapter_path))
    return model, loaded


def load_model(folder: Path, *, dtype: str = "auto", keep_quantized: bool = False, must_fit: bool = True) -> Model:
    """The model of a folder, in evaluation mode, weights unread. See `load` for `dtype`.

    must_fit: raise the memory error for a model that does not fit; False for who never holds all of it at once.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise GenerationError(f"dtype must be auto, {', '.join(DTYPES)}; got {dtype!r}")
    stored = _Stored.read(folder)
    plan = stored.plan(dtype, keep_quantized)
    if must_fit:
        stored.check_memory(plan)
    weights: dict[str, mx.array] = {}
    for file in weight_files(folder):
        weights.update(cast(dict[str, mx.array], mx.load(str(file))))
    model = Model(stored.config)
    if stored.quantization is not None:
        if plan.dequantize:
            weights = _dequantized(weights, stored.quantization)
        else:
            nn.quantize(model, class_predicate=stored.quantization.parameters_of)
    # One dtype throughout, scales included: bfloat16 activations with float16 scales compute in float32.
    held = [(name, value.astype(plan.dtype) if _is_float(value) else value) for name, value in weights.items()]
    model.load_weights(held, strict=True)
    model.eval()
    return model


def is_instruct(name: str, folder: Path) -> bool:
    """Whether a model was tuned to follow instructions: its name says so, or its folder has a chat template."""
    if "instruct" in Path(name).name.lower() or (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json_object(settings).get("chat_template"))


@dataclass(frozen=True)
class _Plan:
    """How the weights will be held."""

    dtype: mx.Dtype
    dequantize: bool
    nbytes: int


@dataclass(frozen=True)
class _Stored:
    """A checked model folder: what its headers and its config say, no value read yet."""

    folder: Path
    config: OpenELMConfig
    tensors: Mapping[str, StoredTensor]
    quantization: Quantization | None

    @classmethod
    def read(cls, folder: Path) -> "_Stored":
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is a file, expected a model folder; convert it first: openelm convert {folder}"
            )
        raw = read_json_object(folder / "config.json")
        if "model_name" in raw and "model_dim" not in raw:
            raise CheckpointError(
                f"{folder} is in the layout of Apple's own MLX port; convert it first: openelm convert {folder}"
            )
        config = OpenELMConfig.from_dict(raw, where=str(folder / "config.json"))
        tensors = read_folder(folder)
        quantization = detect(tensors, raw, config, str(folder))
        config.check_shapes(logical_shapes(tensors, quantization, config), where=str(folder))
        return cls(folder, config, tensors, quantization)

    def plan(self, dtype: str, keep_quantized: bool) -> _Plan:
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        own = _Plan(self._dtype(), False, nbytes)
        if dtype != "auto":
            return _Plan(DTYPES[dtype], False, self._cast_bytes(DTYPES[dtype].size))
        expanded = _Plan(mx.float32, True, self.config.num_parameters() * _FLOAT32_BYTES)
        keeps = keep_quantized and self.quantization is not None
        if device.is_metal() or keeps or own == expanded:
            return own
        if expanded.nbytes > device.available_memory_bytes():
            _log.warning(
                "float32 would be fastest here, but %s do not fit into the %s free: keeping the folder's own dtype",
                _gigabytes(expanded.nbytes),
                _gigabytes(device.available_memory_bytes()),
            )
            return own
        return expanded

    def check_memory(self, plan: _Plan) -> None:
        available = device.available_memory_bytes()
        if plan.nbytes > available:
            raise CheckpointError(
                f"{self.folder} needs {_gigabytes(plan.nbytes)} of memory and {_gigabytes(available)} are free: "
                "close other programs, or convert it with fewer bits (openelm convert -q)"
            )

    def _dtype(self) -> mx.Dtype:
        """The dtype of the activations: that of the embedding, or of its scales where it is packed."""
        embedding = "transformer.token_embeddings"
        tensor = self.tensors.get(f"{embedding}.scales", self.tensors[f"{embedding}.weight"])
        if tensor.dtype not in FLOATING or tensor.dtype == "F64":
            raise CheckpointError(
                f"{self.folder}: {tensor.name} is {mlx_name(tensor.dtype)}, expected {', '.join(DTYPES)}; "
                "convert it first: openelm convert"
            )
        return DTYPES[mlx_name(tensor.dtype)]

    def _cast_bytes(self, itemsize: int) -> int:
        """Bytes held once every floating-point tensor has this item size."""
        return sum(
            math.prod(tensor.shape) * itemsize if tensor.dtype in FLOATING else tensor.nbytes
            for tensor in self.tensors.values()
        )


def _dequantized(weights: dict[str, mx.array], quantization: Quantization) -> dict[str, mx.array]:
    """The same weights with every packed matrix unpacked, still unevaluated."""
    plain = dict(weights)
    for path, settings in quantization.modules.items():
        scales, biases = plain.pop(f"{path}.scales"), plain.pop(f"{path}.biases", None)
        if biases is not None:  # floats: unpack in float32, not in the scales' sixteen bits
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        plain[f"{path}.weight"] = mx.dequantize(
            plain[f"{path}.weight"], scales, biases, **settings.to_dict(), dtype=mx.float32
        )
    return plain


def _is_float(value: mx.array) -> bool:
    return bool(mx.issubdtype(value.dtype, mx.floating))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
