"""What to measure: models, each in several precisions, each at several shapes. Every combination is checked first.

A model comes from a folder or the Hub, or has random weights of a published size (`--size`): speed does not depend on
the values. Its weights are read once; other dtypes and quantisations are made of them tensor by tensor.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint import DTYPES, load_model
from ..config import OpenELMConfig, read_json_object
from ..device import available_memory_bytes, is_metal
from ..errors import GenerationError
from ..hub import resolve_model
from ..model import Model
from ..quantize import QuantizationSettings, plan
from ..safetensors_file import read_folder
from ..tensors import mlx_name
from .session import Shape

DEFAULT_PROMPT_TOKENS, DEFAULT_GENERATION_TOKENS = 512, 128
_EMBEDDING = "transformer.token_embeddings.weight"
_SEED = 0


@dataclass(frozen=True)
class Precision:
    """How weights are held: a dtype as `openelm bench --dtype` has it, or so many bits as `openelm convert -q`."""

    dtype: str = "auto"
    bits: int | None = None

    def __str__(self) -> str:
        return self.dtype if self.bits is None else f"{self.bits}-bit"


@dataclass(frozen=True)
class Source:
    """A model to measure, looked up and not yet read. `folder` is None for random weights."""

    name: str  # a Hub id, a folder's last part (the rest is nobody's business), or `270M (random weights)`
    config: OpenELMConfig
    folder: Path | None = None
    adapter_path: Path | None = None
    keep_quantized: bool = False

    @classmethod
    def named(cls, name: str, *, revision: str | None = None, offline: bool = False, **settings: Any) -> "Source":
        """A folder, a Hub id or `tiny`. Raises an OpenELMError for what is no model."""
        folder = resolve_model(name, revision=revision, offline=offline)
        label = (Path(name).resolve().name or name) if Path(name).exists() else name
        return cls(label, OpenELMConfig.from_file(folder / "config.json"), folder, **settings)

    @classmethod
    def random(cls, size: str) -> "Source":
        """A published size with random weights."""
        return cls(f"{size} (random weights)", OpenELMConfig.from_name(size))

    def check(self, precisions: Sequence[Precision]) -> None:
        """Raise GenerationError where these precisions cannot be made of this model."""
        if precisions == [Precision()] or (len(precisions) == 1 and precisions[0].bits is None):
            return
        if self.adapter_path is not None:
            raise GenerationError("an adapter is measured with the model's own weights: leave out --q-bits and --dtype")
        if self.folder is not None:
            raw = read_json_object(self.folder / "config.json")
            if raw.get("quantization", raw.get("quantization_config")) is not None:
                raise GenerationError(
                    f"{self.name} is quantized already: measure it as it is, or name the model it was made from "
                    "and let --q-bits quantize that"
                )

    def models(self, precisions: Sequence[Precision]) -> Iterator[tuple[Model, int]]:
        """The model in each precision, evaluated, and the bytes held beside it for those that follow.

        Let go of each before asking for the next.
        """
        if self.folder is not None and len(precisions) == 1 and precisions[0].bits is None:
            yield self._as_stored(precisions[0].dtype), 0
            return
        weights, own = self._weights()
        self._check_memory(precisions, own)
        for i, precision in enumerate(precisions):
            model = _made_of(weights, self.config, precision, own, is_last=i == len(precisions) - 1)
            shares = precision.bits is None and _dtype(precision, own) == own  # the very arrays that were read
            yield model, 0 if shares else sum(array.nbytes for array in weights.values())
            del model
            gc.collect()
            mx.clear_cache()

    def _check_memory(self, precisions: Sequence[Precision], own: mx.Dtype) -> None:
        """Raise GenerationError, before the work, when one of them does not fit into the memory that is free."""
        for i, precision in enumerate(precisions):
            bits = precision.bits or 8 * _dtype(precision, own).size
            if i < len(precisions) - 1 and bits != 8 * own.size:
                bits += 8 * own.size  # what was read stays for those that follow; the last takes it away as it goes
            needed, available = self.config.num_parameters() * bits // 8, available_memory_bytes()
            if needed > available:
                raise GenerationError(
                    f"{self.name} in {precision} needs {needed / 1e9:.2f} GB of memory and {available / 1e9:.2f} GB "
                    "are free: take a smaller model, or fewer bits (--q-bits)"
                )

    def _as_stored(self, dtype: str) -> Model:
        assert self.folder is not None
        model = load_model(self.folder, dtype=dtype, keep_quantized=self.keep_quantized)
        if self.adapter_path is not None:
            from ..adapters import load_adapters

            load_adapters(model, self.adapter_path)
            model.eval()
        return model

    def _weights(self) -> tuple[dict[str, mx.array], mx.Dtype]:
        """All weights, unread, and their own dtype."""
        if self.folder is None:
            mx.random.seed(_SEED)
            own = mx.bfloat16 if is_metal() else mx.float32
            return {name: value.astype(own) for name, value in _parameters(Model(self.config))}, own
        name = mlx_name(read_folder(self.folder)[_EMBEDDING].dtype)
        model = load_model(self.folder, dtype=name, must_fit=False)
        return dict(_parameters(model)), DTYPES[name]


def shapes_for(
    prompt_tokens: Sequence[int] | None, generation_tokens: Sequence[int] | None, batches: Sequence[int], context: int
) -> list[Shape]:
    """Every combination, shortest prompt first as given; defaults shrink to what the context has room for.

    Raises GenerationError, with the numbers, where lengths that were asked for do not fit.
    """
    pairs = []
    unset: list[int | None] = [None]
    for prompt, generation in product(prompt_tokens or unset, generation_tokens or unset):
        pairs.append(choose_lengths(prompt, generation, context))
    shapes = [Shape(*lengths, batch) for batch in batches for lengths in pairs]
    for shape in shapes:
        shape.check(context)
    return shapes


def choose_lengths(prompt_tokens: int | None, generation_tokens: int | None, context: int) -> tuple[int, int]:
    """The lengths to measure: those asked for, and defaults that shrink to what the context has room for.

    Raises GenerationError, with the numbers, where lengths that were asked for do not fit.
    """
    default_prompt, default_generation = DEFAULT_PROMPT_TOKENS, DEFAULT_GENERATION_TOKENS
    if default_prompt + default_generation > context:  # the same proportion, over all of the context
        default_prompt = max(1, context * default_prompt // (default_prompt + default_generation))
        default_generation = context - default_prompt
    if prompt_tokens is None:
        prompt_tokens = max(1, min(default_prompt, context - (generation_tokens or default_generation)))
    if generation_tokens is None:
        generation_tokens = max(1, min(default_generation, context - prompt_tokens))
    Shape(prompt_tokens, generation_tokens).check(context)
    return prompt_tokens, generation_tokens


def precisions_of(dtypes: Sequence[str] | None, bits: Sequence[int] | None) -> list[Precision]:
    """What `--dtype` and `--q-bits` ask for, dtypes first; the folder's own where neither says anything."""
    chosen = [Precision(dtype) for dtype in dtypes or ()] + [Precision(bits=count) for count in bits or ()]
    return chosen or [Precision()]


def _made_of(
    weights: dict[str, mx.array], config: OpenELMConfig, precision: Precision, own: mx.Dtype, *, is_last: bool
) -> Model:
    """A model with these weights in a precision, one tensor at a time; the last one takes them away as it goes."""
    model = Model(config)
    packing = None
    if precision.bits is not None:
        packing = plan(config, QuantizationSettings.of(bits=precision.bits))
        nn.quantize(model, class_predicate=packing.parameters_of)
    dtype, held = _dtype(precision, own), {}
    for name in list(weights):
        value = weights.pop(name) if is_last else weights[name]
        settings = None if packing is None else packing.modules.get(name.removesuffix(".weight"))
        if settings is None:
            parts = {name: value.astype(dtype)}
        else:
            packed = mx.quantize(value.astype(dtype), **settings.to_dict())
            suffixes = ("weight", "scales", "biases")[: len(packed)]
            parts = {f"{name.removesuffix('weight')}{suffix}": p for suffix, p in zip(suffixes, packed, strict=True)}
        del value
        mx.eval(parts)
        held.update(parts)
    model.load_weights(list(held.items()), strict=True)
    model.eval()
    return model


def _dtype(precision: Precision, own: mx.Dtype) -> mx.Dtype:
    if precision.bits is None and precision.dtype != "auto":
        return DTYPES[precision.dtype]
    return own if precision.bits is not None or is_metal() else mx.float32


def _parameters(model: Model) -> list[tuple[str, mx.array]]:
    parameters: Any = tree_flatten(model.parameters())
    return parameters
