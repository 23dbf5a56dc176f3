"""A model that computes from its files: a few megabytes of a weight are in memory at a time, however large it is."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import OpenELMConfig
from ..model import TransformerBlock
from ..quantize import EMBEDDINGS, Quantization, QuantizationSettings
from ..tensors import StoredTensor, to_mlx
from .blocks import in_threads, row_ranges
from .streaming import Tick, in_turn

_FLOAT32_BYTES = 4
_FEW_TOKENS = 12  # beyond, unpacking a weight once is cheaper on a CPU than multiplying with it packed


class StoredModel:
    """The tensors of a model folder, and the layers made of them. `tick` is told how many bytes were read."""

    def __init__(self, tensors: Mapping[str, StoredTensor], quantization: Quantization | None, tick: Tick):
        self._tensors, self._tick = tensors, tick
        self._modules = quantization.modules if quantization else {}

    def logits(
        self,
        config: OpenELMConfig,
        tokens: Sequence[int],
        dtype: str,
        check: Callable[[mx.array, str], None] = lambda values, where: None,
    ) -> mx.array:
        """What the model predicts after each token, (L, V), computed in `dtype`.

        `check` is shown everything on the way: (values, what gave them).
        """
        embedding, head = EMBEDDINGS
        hidden = self.embed(embedding, tokens).astype(getattr(mx, dtype))[None]  # (1, L, E)
        check(hidden, "the embedding")
        for i in range(config.num_transformer_layers):
            hidden = self.block(config, i)(hidden)
            check(hidden, f"layer {i} (of 0 to {config.num_transformer_layers - 1})")
            mx.eval(hidden)
        hidden = mx.fast.rms_norm(hidden, self.vector("transformer.norm.weight"), config.rms_norm_eps)
        logits = self.linear(embedding if config.share_input_output_layers else head)(hidden)
        check(logits, "the output head")
        return logits[0]

    def vector(self, name: str) -> mx.array:
        """A small tensor, whole."""
        return _array(self._tensors[name].read(), self._tensors[name].dtype)

    def embed(self, path: str, tokens: Sequence[int]) -> mx.array:
        """Embeddings of the tokens, (L, E)."""
        embedding = self.linear(path)
        return mx.concatenate([embedding.rows(token, token + 1) for token in tokens])

    def linear(self, path: str) -> "StoredLinear":
        """The matrix of a module, packed or not."""
        names = [f"{path}.{suffix}" for suffix in ("weight", "scales", "biases")]
        parts = [self._tensors[name] for name in names if name in self._tensors]
        return StoredLinear(parts, self._modules.get(path), self._tick)

    def block(self, config: OpenELMConfig, layer: int) -> TransformerBlock:
        """A layer whose norms are in memory and whose matrices are in their files."""
        block = TransformerBlock(config, layer)
        prefix = f"transformer.layers.{layer}."
        for name in config.parameter_shapes():
            if not name.startswith(prefix):
                continue
            *parents, attribute, _ = name.removeprefix(prefix).split(".")
            owner: nn.Module = block
            for parent in parents:
                owner = getattr(owner, parent)
            if isinstance(getattr(owner, attribute), nn.Linear):
                setattr(owner, attribute, self.linear(name.removesuffix(".weight")))
            else:
                getattr(owner, attribute).weight = self.vector(name)
        return block


class StoredLinear(nn.Module):
    """x @ weight.T, for x of the dtype that the weight has, or had before it was packed."""

    def __init__(self, parts: Sequence[StoredTensor], settings: QuantizationSettings | None, tick: Tick):
        super().__init__()
        self.stored = (parts, settings, tick)

    def __call__(self, x: mx.array) -> mx.array:
        parts, settings, tick = self.stored
        ranges = row_ranges(parts[0], row_bytes=_FLOAT32_BYTES * x.shape[-1])
        blocks = in_threads(partial(_read, parts, start, stop) for start, stop in ranges)
        jobs = (partial(_product, x, _to_mlx(parts, block), settings) for block in blocks)
        products = [product for (product,) in in_turn(jobs)]
        tick(sum(part.nbytes for part in parts))
        return mx.concatenate(products, axis=-1)

    def rows(self, start: int, stop: int) -> mx.array:
        """Rows [start, stop) of the weight, unpacked."""
        parts, settings, _ = self.stored
        weight, *rest = _to_mlx(parts, _read(parts, start, stop))
        return mx.dequantize(weight, *_scales_biases(rest), **settings.to_dict()) if settings else weight


def _read(parts: Sequence[StoredTensor], start: int, stop: int) -> list[np.ndarray]:
    return [part.read_rows(start, stop) for part in parts]


def _to_mlx(parts: Sequence[StoredTensor], rows: Sequence[np.ndarray]) -> list[mx.array]:
    return [_array(values, part.dtype) for part, values in zip(parts, rows, strict=True)]


def _array(values: np.ndarray, code: str) -> mx.array:
    """No Metal GPU has float64."""
    return to_mlx(values.astype(np.float32), "F32") if code == "F64" else to_mlx(values, code)


def _product(x: mx.array, block: Sequence[mx.array], settings: QuantizationSettings | None) -> tuple[mx.array]:
    """x (1, L, E) times these rows of a weight, (1, L, rows); summed in float32, rounded to the dtype of x.

    On a CPU, MLX's products of bfloat16 are quick for a few tokens; those of float16 and of packed weights with
    16-bit scales never are, so these are widened first.
    """
    weight, *rest = block
    few = x.shape[1] <= _FEW_TOKENS
    if settings is None and few and x.dtype == mx.bfloat16:
        return (x @ weight.T,)
    wide = x.astype(mx.float32)
    if settings is None:
        return ((wide @ weight.astype(mx.float32).T).astype(x.dtype),)
    scales, biases = _scales_biases([part if part.dtype == mx.uint8 else part.astype(mx.float32) for part in rest])
    options = settings.to_dict()
    if few:
        return (mx.quantized_matmul(wide, weight, scales, biases, **options).astype(x.dtype),)
    unpacked = mx.dequantize(weight, scales, biases, **options, dtype=mx.float32)
    return ((wide @ unpacked.T).astype(x.dtype),)


def _scales_biases(parts: Sequence[mx.array]) -> tuple[mx.array, mx.array | None]:
    """Only affine has biases."""
    return parts[0], parts[1] if len(parts) > 1 else None
