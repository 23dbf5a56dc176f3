"""GPTQ: the layers' matrices are rounded column by column, each column's error made up for by those still to come.

How much columns can do for each other is told by what goes through a matrix while the model reads a calibration text.
The method is mlx-lm's (`mlx_lm.quant.gptq`; Frantar et al. 2022, arXiv:2210.17323), imported only here; embedding, head
and norms are treated as in any conversion. All is in memory, in float32: the one conversion that is not streamed.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import OpenELMConfig
from ..config_keys import counted
from ..device import available_memory_bytes
from ..errors import CheckpointError, ConfigError, OutputError, RunFailedError
from ..home import expand_home
from ..hub import BUNDLED_MODEL
from ..memory import MARGIN_BYTES
from ..model import TransformerBlock
from ..quantize import Quantization, QuantizationSettings, matrices
from ..tensors import CODES, StoredTensor, from_mlx, to_mlx
from ..tokenizer import Tokenizer
from .blocks import is_finite
from .sources import EMBEDDING, Source
from .streaming import outputs, transformed

GPTQ_BITS = (2, 4, 8)  # what mlx-lm's packing of given scales can do
CALIBRATION_TEXT = BUNDLED_MODEL.parent / "texts" / "calibration.txt"
_WINDOW, _WINDOWS, _BATCH = 512, 128, 4  # tokens, at most how many of them, how many at a time
_FLOAT32_BYTES = 4
_LAYERS = "transformer.layers."


def check_settings(settings: QuantizationSettings, recipe: str) -> None:
    """Raise ConfigError for what GPTQ does not do."""
    if settings.mode != "affine":
        raise ConfigError(f"--method gptq needs --q-mode affine, got {settings.mode}")
    if settings.bits not in GPTQ_BITS:
        raise ConfigError(f"--method gptq packs 2, 4 or 8 bits, got {settings.bits}; choose one of these")
    if recipe != "uniform":
        raise ConfigError(f"--method gptq gives all layers the same bits: leave out --recipe {recipe}")


def check_quantization(config: OpenELMConfig, quantization: Quantization) -> None:
    """Raise ConfigError when a matrix of a layer is not made up of whole groups: GPTQ packs all of them."""
    width = next((shape[1] for path, shape in _linears(config).items() if path not in quantization.modules), None)
    if width is not None:
        raise ConfigError(
            f"--method gptq packs every matrix, but rows of {width} are not whole groups of "
            f"{quantization.default.group_size}; choose a smaller --q-group-size"
        )


def needed_bytes(config: OpenELMConfig) -> int:
    """Memory that GPTQ takes: the model, a square matrix for every matrix's inputs, and what it works with."""
    shapes = _linears(config).values()
    squares = [shape[1] ** 2 for shape in shapes]
    working = 4 * max(squares) + 4 * max(rows * width for rows, width in shapes)
    return _FLOAT32_BYTES * (config.num_parameters() + sum(squares) + working) + MARGIN_BYTES


def check_memory(config: OpenELMConfig) -> None:
    """Raise OutputError when this machine has less memory to give."""
    needed, available = needed_bytes(config), available_memory_bytes()
    if available < needed:
        raise OutputError(
            f"--method gptq holds the model in memory and needs {needed / 1e9:.2f} GB, {available / 1e9:.2f} GB are "
            "available; close other programs, or use --recipe mixed, which needs next to none"
        )


def calibration_windows(text: Path | None, tokenizer: Path, config: OpenELMConfig, seed: int) -> np.ndarray:
    """Ids (N, L) of windows of a text file (None: the bundled one), chosen by the seed where it has more than needed.

    Raises CheckpointError for a file that is no text, or too short for a single window.
    """
    file = CALIBRATION_TEXT if text is None else text
    try:
        content = expand_home(file).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read the calibration text {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"the calibration text {file} is not UTF-8; name a plain text file") from None
    ids = Tokenizer.from_path(tokenizer, vocab_size=config.vocab_size).encode(content)
    length = min(_WINDOW, config.max_context_length)
    count = len(ids) // length
    if count == 0:
        raise CheckpointError(
            f"the calibration text {file} has {counted(len(ids), 'token')}, expected at least {length}"
        )
    windows = np.array(ids[: count * length]).reshape(count, length)
    chosen = np.random.default_rng(seed).permutation(count)[:_WINDOWS]
    return windows[np.sort(chosen)]


def calibrated(source: Source, quantization: Quantization, dtype: str, windows: np.ndarray) -> Source:
    """The same model packed as `quantization` says, its layers by GPTQ; scales and norms in `dtype`.

    windows: int (N, L), ids below the vocabulary's size. Raises RunFailedError when the numbers do not come out.
    """
    packed = _packed_layers(source, quantization.default, windows, dtype)
    in_order = {name: source.tensors[name] for name in source.config.parameter_shapes()}
    rest = {name: tensor for name, tensor in in_order.items() if name not in packed}
    packed |= _packed_rest(rest, dtype, quantization)
    tensors = {
        planned.name: StoredTensor(planned.name, planned.dtype, planned.shape, _rows_of(array))
        for name, group in outputs(in_order, dtype, quantization).items()
        for planned, array in zip(group, packed[name], strict=True)
    }
    return replace(source, tensors=tensors, quantization=quantization, is_computed=True)


class _Layers(nn.Module):
    """The transformer layers behind their embedding: what mlx-lm calibrates. Norm and head would change nothing."""

    def __init__(self, source: Source):
        super().__init__()
        self.embedding = _float32(source.tensors[EMBEDDING])
        self.layers = [TransformerBlock(source.config, i) for i in range(source.config.num_transformer_layers)]
        names = [name for name in source.tensors if name.startswith(_LAYERS)]
        weights = [(name.removeprefix("transformer."), _float32(source.tensors[name])) for name in names]
        self.load_weights(weights, strict=False)
        self.eval()

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens: int (B, L) -> (B, L, E)."""
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        return x


def _packed_layers(
    source: Source, settings: QuantizationSettings, windows: np.ndarray, dtype: str
) -> dict[str, Sequence[np.ndarray]]:
    """Name of a layer's matrix -> its (weight, scales, biases)."""
    from mlx_lm.quant.gptq import gptq_quantize

    model, bits, group = _Layers(source), settings.bits, settings.group_size
    if not mx.all(mx.isfinite(model(mx.array(windows[:1])))).item():
        raise RunFailedError(f"{source.path}: the calibration text gives activations that are not numbers")
    try:
        with _quiet():
            gptq_quantize(model, mx.array(windows), bits, group, bits, group, batch_size=_BATCH)
    except RuntimeError as error:  # a matrix that only ever saw zeros has no inverse
        raise RunFailedError(f"GPTQ failed ({' '.join(str(error).split())}); try a longer calibration text") from None
    modules = dict(model.named_modules())
    packed: dict[str, Sequence[np.ndarray]] = {}
    for path in _linears(source.config):
        layer = modules[path.removeprefix("transformer.")]
        floats = [from_mlx(part.astype(getattr(mx, dtype))) for part in (layer.scales, layer.biases)]
        if not all(is_finite(part, CODES[dtype]) for part in floats):
            raise RunFailedError(f"GPTQ gives {path} scales that are not numbers in {dtype}; try a longer text")
        packed[f"{path}.weight"] = [from_mlx(layer.weight), *floats]
    return packed


def _packed_rest(
    tensors: Mapping[str, StoredTensor], dtype: str, quantization: Quantization
) -> dict[str, Sequence[np.ndarray]]:
    """Embedding, head and norms, as a streamed conversion writes them, but whole."""
    blocks: dict[str, list[tuple[np.ndarray, ...]]] = {}
    for name, (rows,) in transformed(tensors, dtype, [quantization]):
        blocks.setdefault(name, []).append(tuple(rows))
    return {name: [np.concatenate(part) for part in zip(*each, strict=True)] for name, each in blocks.items()}


def _linears(config: OpenELMConfig) -> dict[str, tuple[int, ...]]:
    return {path: shape for path, shape in matrices(config).items() if path.startswith(_LAYERS)}


def _float32(tensor: StoredTensor) -> mx.array:
    values = tensor.read()
    code = tensor.dtype
    if code == "F64":  # no Metal GPU has it
        values, code = values.astype(np.float32), "F32"
    return to_mlx(values, code).astype(mx.float32)


def _rows_of(array: np.ndarray) -> Callable[[int, int], np.ndarray]:
    return lambda start, stop: array[start:stop]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """mlx-lm shows its progress whether or not anybody looks; here only a terminal gets it."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield
