"""How far a conversion moved a model: what the new weights predict, against what the source's predict.

Both go through the same fixed text, layer by layer from their files: the source in float32, the new model in its own
dtype, as it will run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..config import OpenELMConfig
from ..quantize import Quantization
from ..tensors import StoredTensor
from ..tokenizer import Tokenizer
from .stored_model import StoredModel
from .streaming import Tick

_MAX_TOKENS = 64
_TEXT = (
    "The lighthouse keeper wrote down the weather every evening: wind from the north-west, 7 degrees, the sea calm. "
    "In spring the first boats came back to the harbour with salt, letters and news, and the children ran down to the "
    "pier to count them. That year there were eleven, one fewer than the year before, and nobody said a word about it."
)


@dataclass(frozen=True)
class Measurement:
    """`kl`: mean Kullback-Leibler divergence from the source's next-token distribution, in nats a token.

    `largest`: the largest difference of a logit.
    """

    kl: float
    tokens: int
    largest: float

    def __str__(self) -> str:
        return f"KL to the source {self.kl:.2g} nats a token ({self.tokens} tokens)"


def fixed_prompt(tokenizer: Path, config: OpenELMConfig) -> list[int]:
    """The same ids for every conversion of a model."""
    ids = Tokenizer.from_path(tokenizer, vocab_size=config.vocab_size).encode(_TEXT)
    return ids[: min(_MAX_TOKENS, config.max_context_length)]


def source_logits(
    tensors: Mapping[str, StoredTensor], config: OpenELMConfig, tokens: list[int], tick: Tick
) -> np.ndarray:
    """What unquantised tensors predict, (L, V), in float32."""
    return np.array(StoredModel(tensors, None, tick).logits(config, tokens, "float32"))


def measure(
    expected: np.ndarray,
    written: Mapping[str, StoredTensor],
    config: OpenELMConfig,
    quantization: Quantization | None,
    dtype: str,
    tokens: list[int],
    tick: Tick,
) -> Measurement:
    """The distance of written tensors from the `expected` logits (L, V)."""
    found = np.array(StoredModel(written, quantization, tick).logits(config, tokens, dtype).astype(mx.float32))
    distances = [_kl(one, other) for one, other in zip(expected, found, strict=True)]
    return Measurement(float(np.mean(distances)), len(tokens), float(np.abs(expected - found).max()))


def _kl(expected: np.ndarray, found: np.ndarray) -> float:
    """KL(expected || found) of two rows of logits, (V,) each, summed in float64."""
    p, q = _log_softmax(expected), _log_softmax(found)
    return max(0.0, float(np.sum(np.exp(p) * (p - q))))  # rounding may leave a hair below zero


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.sum(np.exp(shifted)))
