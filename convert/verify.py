"""Is what was written what was meant? Asked of the files themselves, before they get their name.

A copy must have the source's bytes. After a change of dtype or quantisation tokens go through the written model, a few
megabytes of it in memory at a time: activations that leave a dtype's range (3B in float16 prints nothing but
<unk>) show here, and the layer is named.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from ..config import OpenELMConfig, read_json_object
from ..errors import RunFailedError
from ..quantize import Quantization, detect
from ..safetensors_file import read_folder
from ..safetensors_writer import PlannedTensor
from ..tensors import StoredTensor
from .blocks import same_bytes
from .stored_model import StoredModel
from .streaming import Tick

# How many tokens go through the model. In float16 activations overflow at some tokens and not at others, so many are
# tried; no OpenELM comes near the range of the other dtypes, where one token finds what damaged weights do.
_TOKENS = {"float16": 32, "bfloat16": 1, "float32": 1}


def check_folder(
    folder: Path, plan: Sequence[PlannedTensor], config: OpenELMConfig, quantization: Quantization | None
) -> dict[str, StoredTensor]:
    """The tensors of a written folder, read back. Raises RunFailedError unless they and its config are as planned."""
    written = read_folder(folder)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in written.items()}
    if found != {tensor.name: (tensor.dtype, tensor.shape) for tensor in plan}:
        raise RunFailedError(f"{folder}: the tensors on disk are not those that were written; is the disk sound?")
    raw = read_json_object(folder / "config.json")
    if OpenELMConfig.from_dict(raw) != config or detect(written, raw, config, str(folder)) != quantization:
        raise RunFailedError(f"{folder}: config.json does not give the model's configuration back")
    return written


def check_copy(source: Mapping[str, StoredTensor], written: Mapping[str, StoredTensor], tick: Tick) -> None:
    """Raise RunFailedError unless every tensor has the source's bytes."""
    for name, tensor in written.items():
        if not same_bytes(tensor, source[name]):
            raise RunFailedError(f"{name} on disk differs from the source; is the disk sound?")
        tick(tensor.nbytes)


def check_forward(
    written: Mapping[str, StoredTensor],
    config: OpenELMConfig,
    quantization: Quantization | None,
    dtype: str,
    tick: Tick,
) -> None:
    """Raise RunFailedError, naming the layer, unless activations and logits are finite."""

    def check(values: mx.array, where: str) -> None:
        if not mx.all(mx.isfinite(values)).item():
            raise RunFailedError(
                f"{where} gives values that are infinite or not a number in {dtype}: "
                "its range is too small for this model, or the weights are damaged; try --dtype bfloat16 or float32"
            )

    StoredModel(written, quantization, tick).logits(config, _prompt(config, _TOKENS[dtype]), dtype, check)


def _prompt(config: OpenELMConfig, length: int) -> list[int]:
    """BOS, where activations are largest by far, then ids from all over the vocabulary."""
    step = max(1, config.vocab_size // length)
    return [min(config.bos_token_id, config.vocab_size - 1), *range(step, config.vocab_size, step)][:length]
