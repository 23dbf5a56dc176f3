"""openelm-mlx: Apple's OpenELM language models on Apple silicon.

Importing this package costs nothing; each name below is imported when it is first used (PEP 562).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import load
    from .config import OpenELMConfig
    from .errors import OpenELMError
    from .generation import GenerationResponse, generate, generate_step, stream_generate
    from .model import Model
    from .sampling import make_logits_processors, make_sampler
    from .tokenizer import Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "load": "checkpoint",
    "OpenELMConfig": "config",
    "OpenELMError": "errors",
    "GenerationResponse": "generation",
    "generate": "generation",
    "generate_step": "generation",
    "stream_generate": "generation",
    "Model": "model",
    "make_logits_processors": "sampling",
    "make_sampler": "sampling",
    "Tokenizer": "tokenizer",
}
__all__ = [
    "GenerationResponse",
    "Model",
    "OpenELMConfig",
    "OpenELMError",
    "Tokenizer",
    "generate",
    "generate_step",
    "load",
    "make_logits_processors",
    "make_sampler",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
