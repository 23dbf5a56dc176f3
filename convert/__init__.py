"""Any released OpenELM checkpoint -> an MLX model folder.

from openelm_mlx.convert import convert
convert("apple/OpenELM-270M", "mlx_model", quantize=True)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import ConversionSummary, convert

__all__ = ["ConversionSummary", "convert"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import conversion

    return getattr(conversion, name)
