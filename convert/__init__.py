"""Any released OpenELM checkpoint -> an MLX model folder.

from openelm_mlx.convert import convert
convert("apple/OpenELM-270M", "mlx_model", quantize=True)
convert_all("apple/OpenELM-270M", "mlx_model", q_bits=[4, 8])  # mlx_model-4bit and mlx_model-8bit from one read
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import ConversionSummary, Options, convert, convert_all

__all__ = ["ConversionSummary", "Options", "convert", "convert_all"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import conversion

    return getattr(conversion, name)
