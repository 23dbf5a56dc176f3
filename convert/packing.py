"""How a conversion packs matrices: bits, groups and kinds, by which method, and with which of them raised."""

from dataclasses import dataclass
from pathlib import Path

from ..config import OpenELMConfig
from ..errors import ConfigError
from ..mixed_bits import raised_bits
from ..quantize import RECIPES, Quantization, QuantizationSettings, plan
from .sources import Source

METHODS = ("plain", "gptq")


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What `-q` does.

    quantize: pack matrices with `q_bits` in groups of `q_group_size` (None: the mode's defaults), embeddings with
    `embedding_bits` (16: not at all; None: 8, or what the recipe says). recipe: `mixed` raises what is easily hurt
    (mixed_bits.py). method: `gptq` rounds the layers' matrices by what passes through them (gptq.py), in memory, while
    the model reads `calibration` (a text file; None: the bundled one), from which `seed` chooses.
    """

    quantize: bool = False
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str = "affine"
    embedding_bits: int | None = None
    recipe: str = "uniform"
    method: str = "plain"
    calibration: str | Path | None = None
    seed: int | None = None

    @property
    def settings(self) -> QuantizationSettings | None:
        """Raises ConfigError for bits, a group or a mode that do not go together."""
        return QuantizationSettings.of(self.q_mode, self.q_bits, self.q_group_size) if self.quantize else None

    @property
    def refinement(self) -> str | None:
        """What is done beyond packing every matrix alike by rounding, in words."""
        if self.method == "gptq":
            return "by GPTQ"
        return "more for sensitive matrices" if self.recipe == "mixed" else None

    def check_packing(self) -> None:
        """Raise ConfigError for what does not go together, whatever the model."""
        for name, value, valid in (("recipe", self.recipe, RECIPES), ("method", self.method, METHODS)):
            if value not in valid:
                raise ConfigError(f"{name} {value!r} is unknown; valid: {', '.join(valid)}")
        settings = self.settings
        if settings is None and (self.recipe, self.method) != ("uniform", "plain"):
            raise ConfigError("--recipe and --method say how to quantize: add -q to do so")
        if self.method != "gptq" and not (self.calibration is None and self.seed is None):
            raise ConfigError("--calibration and --seed are for --method gptq: add that, or leave them out")
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more, got {self.seed}")
        if settings is not None and self.recipe == "mixed":
            raised_bits(settings.bits, settings.mode)
        if settings is not None and self.method == "gptq":
            from .gptq import check_settings

            check_settings(settings, self.recipe)

    def planned(self, config: OpenELMConfig) -> Quantization | None:
        """What is done to every matrix. Raises ConfigError when there is nothing that can be packed."""
        settings = self.settings
        if settings is None:
            return None
        quantization = plan(config, settings, self.embedding_bits, self.recipe)
        if not quantization.modules:
            raise ConfigError(
                f"no row of this model is made up of whole groups of {settings.group_size}; nothing to quantize"
            )
        if self.method == "gptq":
            from .gptq import check_memory, check_quantization

            check_quantization(config, quantization)
            check_memory(config)
        return quantization

    def packed(self, source: Source, tokenizer: Path, dtype: str) -> Source:
        """The source to stream: itself, or with `gptq` its packed tensors, computed here and now."""
        if not self.quantize or self.method != "gptq":
            return source
        from .gptq import calibrated, calibration_windows

        quantization = self.planned(source.config)
        assert quantization is not None
        text = None if self.calibration is None else Path(self.calibration)
        return calibrated(
            source, quantization, dtype, calibration_windows(text, tokenizer, source.config, self.seed or 0)
        )
