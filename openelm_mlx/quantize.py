"""Quantisation as a model folder records it: which matrices are packed, with how many bits, in groups of what size.

A packed matrix takes three tensors (`.weight` in uint32, `.scales`, and for affine `.biases`), or two in the
microscaling modes. config.json's `quantization` holds the common settings, and under a module's path its own
settings, or `false` for a module that was left as it is: mlx-lm and mlx-swift read the same.

The tied embedding counts twice, on the way in and as the output head, and small models suffer most when it is
coarse: it stays affine with 8 bits unless asked otherwise. Norms are never packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .config import OpenELMConfig
from .errors import CheckpointError, ConfigError
from .mixed_bits import is_raised, raised_bits, raised_layers
from .tensors import StoredTensor

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
_DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # mode -> (bits, group size)
MODES = tuple(_DEFAULTS)
RECIPES = ("uniform", "mixed")
_EMBEDDING_BITS = 8
UNQUANTIZED_BITS = 16  # `embedding_bits=16` leaves the embedding alone
EMBEDDINGS = ("transformer.token_embeddings", "lm_head")  # modules that speak in vocabulary, not in features


@dataclass(frozen=True)
class QuantizationSettings:
    """How one matrix is packed: `group_size` values along a row share a scale."""

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"

    @classmethod
    def of(cls, mode: str = "affine", bits: int | None = None, group_size: int | None = None) -> "QuantizationSettings":
        """Checked settings, with the mode's defaults for what is None. Raises ConfigError, saying what is valid."""
        if mode not in _DEFAULTS:
            raise ConfigError(f"quantization mode {mode!r} is unknown; valid modes: {', '.join(MODES)}")
        default_bits, default_group = _DEFAULTS[mode]
        chosen = cls(default_bits if bits is None else bits, default_group if group_size is None else group_size, mode)
        if mode != "affine" and chosen != cls(default_bits, default_group, mode):
            raise ConfigError(
                f"{chosen}: mode {mode} always has {default_bits} bits in groups of {default_group}; leave both out"
            )
        if mode == "affine" and (chosen.bits not in AFFINE_BITS or chosen.group_size not in AFFINE_GROUP_SIZES):
            raise ConfigError(
                f"{chosen}: affine quantization has {_alternatives(AFFINE_BITS)} bits "
                f"in groups of {_alternatives(AFFINE_GROUP_SIZES)}"
            )
        return chosen

    def __str__(self) -> str:
        return f"{self.mode}, {self.bits} bits, groups of {self.group_size}"

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json, which are also the arguments of `nn.Module.to_quantized`."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def fits(self, width: int) -> bool:
        """Whether whole groups make up a row of this width."""
        return width % self.group_size == 0

    def packed(self, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Suffix -> (dtype code, shape) of the tensors that hold a matrix (rows, width) whose own dtype is `dtype`."""
        rows, width = shape
        groups = (rows, width // self.group_size)
        parts: dict[str, tuple[str, tuple[int, ...]]] = {"weight": ("U32", (rows, width * self.bits // 32))}
        if self.mode == "affine":
            # Scales in the activations' dtype: bfloat16 activations with float16 scales compute in float32.
            return parts | {"scales": (dtype, groups), "biases": (dtype, groups)}
        return parts | {"scales": ("U8", groups)}


@dataclass(frozen=True)
class Quantization:
    """A model's quantisation: the common settings, and every packed module (by path) with its own.

    `skipped` are modules left unquantised on purpose, recorded so that no reader has to guess.
    """

    default: QuantizationSettings
    modules: Mapping[str, QuantizationSettings]
    skipped: tuple[str, ...] = field(default=())

    def to_config(self) -> dict[str, Any]:
        """The `quantization` entry of config.json."""
        own = {path: settings.to_dict() for path, settings in self.modules.items() if settings != self.default}
        return self.default.to_dict() | own | dict.fromkeys(self.skipped, False)

    def parameters_of(self, path: str, module: object = None) -> dict[str, Any] | bool:
        """The answer that `mlx.nn.quantize` wants of its `class_predicate`."""
        settings = self.modules.get(path)
        return False if settings is None else settings.to_dict()


def plan(
    config: OpenELMConfig,
    settings: QuantizationSettings,
    embedding_bits: int | None = None,
    recipe: str = "uniform",
) -> Quantization:
    """What to do with every matrix of a model; rows that whole groups do not make up stay unquantised.

    `embedding_bits` is for the embedding and an untied head: affine, or `UNQUANTIZED_BITS`; None is 8, or what the
    recipe says. `recipe`: one of `RECIPES`; see mixed_bits.py. Raises ConfigError.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"recipe {recipe!r} is unknown; valid recipes: {', '.join(RECIPES)}")
    shapes = matrices(config)
    raised, layers = settings, []
    if recipe == "mixed":
        raised, layers = replace(settings, bits=raised_bits(settings.bits, settings.mode)), raised_layers(shapes)
    if embedding_bits is None:
        embedding_bits = _EMBEDDING_BITS if recipe == "uniform" else raised.bits
    embedding = None
    if embedding_bits != UNQUANTIZED_BITS:
        group_size = settings.group_size if settings.mode == "affine" else None
        embedding = QuantizationSettings.of("affine", embedding_bits, group_size)
    modules, skipped = {}, []
    for path, shape in shapes.items():
        chosen = embedding if path in EMBEDDINGS else raised if is_raised(path, layers) else settings
        if chosen is not None and chosen.fits(shape[1]):
            modules[path] = chosen
        else:
            skipped.append(path)
    return Quantization(settings, modules, tuple(skipped))


def matrices(config: OpenELMConfig) -> dict[str, tuple[int, ...]]:
    """Module path -> shape of everything that can be quantised."""
    return {name.removesuffix(".weight"): shape for name, shape in config.parameter_shapes().items() if len(shape) == 2}


def detect(
    tensors: Mapping[str, StoredTensor], raw_config: Mapping[str, Any], config: OpenELMConfig, where: str
) -> Quantization | None:
    """The quantisation of a checkpoint, or None. The tensors decide; config.json must agree.

    Reads what mlx-lm and mlx-community wrote: a module that config.json does not name is known by its shapes.
    Raises CheckpointError or ConfigError where the two contradict each other.
    """
    entry = _config_entry(raw_config, where)
    widths = {path: shape[1] for path, shape in matrices(config).items()}
    packed = [path for path in widths if f"{path}.scales" in tensors]
    if not packed:
        if entry is None:
            return None
        raise CheckpointError(
            f"{where}: config.json says the weights are quantized, but no tensor is; download it again"
        )
    if entry is None:
        raise CheckpointError(
            f"{where}: the weights are quantized, config.json does not say so; "
            'put back its "quantization" entry (bits, group_size) or convert the original again'
        )
    default = _settings(entry, f'{where}: "quantization"')
    modules = {path: _module_settings(path, entry, default, widths[path], tensors, where) for path in packed}
    return Quantization(default, modules, tuple(path for path in widths if entry.get(path) is False))


def logical_shapes(
    tensors: Mapping[str, StoredTensor], quantization: Quantization | None, config: OpenELMConfig
) -> dict[str, tuple[int, ...]]:
    """The shapes that `config.check_shapes` knows: a packed matrix under its one name with its unpacked shape.

    A matrix whose packed tensors do not belong together keeps them, so that the check names what is odd.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for path, settings in (quantization.modules if quantization else {}).items():
        expected = matrices(config)[path]
        parts = {f"{path}.{suffix}": shape for suffix, (_, shape) in settings.packed(expected, "F32").items()}
        if all(shapes.get(name) == shape for name, shape in parts.items()):
            for name in parts:
                del shapes[name]
            shapes[f"{path}.weight"] = expected
    return shapes


def _config_entry(raw_config: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """The `quantization` entry of a config.json, or the copy of it that mlx-lm writes for the Hub."""
    entry = raw_config.get("quantization", raw_config.get("quantization_config"))
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ConfigError(f'{where}: "quantization" must hold settings, got {entry!r}')
    if "quant_method" in entry:
        raise ConfigError(
            f"{where}: quantized by {entry['quant_method']!r}, expected MLX's own; take the original weights"
        )
    return entry


def _settings(entry: Mapping[str, Any], where: str) -> QuantizationSettings:
    for key in ("bits", "group_size"):
        value = entry.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{where} has {key} {value!r}, expected a whole number; download config.json again")
    try:
        return QuantizationSettings.of(entry.get("mode", "affine"), entry["bits"], entry["group_size"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _module_settings(
    path: str,
    entry: Mapping[str, Any],
    default: QuantizationSettings,
    width: int,
    tensors: Mapping[str, StoredTensor],
    where: str,
) -> QuantizationSettings:
    """What config.json says of a module, else what its shapes say."""
    found = _from_shapes(path, width, tensors, where)
    named = entry.get(path)
    if named is None or named is True:
        return found
    if named is False:
        raise CheckpointError(f"{where}: {path} is quantized, but config.json says it is not; download it again")
    if not isinstance(named, Mapping):
        raise ConfigError(f'{where}: "quantization" has {named!r} for {path}, expected settings, true or false')
    said = _settings(default.to_dict() | dict(named), f'{where}: "quantization" of {path}')
    if said != found:
        raise CheckpointError(f"{where}: config.json says {path} is {said}; its tensors are {found}; download it again")
    return said


def _from_shapes(path: str, width: int, tensors: Mapping[str, StoredTensor], where: str) -> QuantizationSettings:
    """Bits, group and mode that explain the shapes of a packed matrix with rows of `width` values."""
    scales, weight = tensors[f"{path}.scales"], tensors.get(f"{path}.weight")
    if weight is not None and weight.dtype == "U32" and len(weight.shape) == len(scales.shape) == 2:
        for settings in _possible(scales.dtype):
            parts = settings.packed((weight.shape[0], width), scales.dtype)
            if settings.fits(width) and all(
                f"{path}.{suffix}" in tensors and tensors[f"{path}.{suffix}"].shape == shape
                for suffix, (_, shape) in parts.items()
            ):
                return settings
    shapes = ", ".join(f"{suffix} {tensors[f'{path}.{suffix}'].shape}" for suffix in _present(path, tensors))
    raise CheckpointError(f"{where}: {path} is not quantized in any way known here ({shapes} for {width} features)")


def _possible(scales_dtype: str) -> list[QuantizationSettings]:
    """Settings whose scales have this dtype: bytes in the microscaling modes, floats in affine."""
    if scales_dtype == "U8":
        return [
            QuantizationSettings(bits, group, mode) for mode, (bits, group) in _DEFAULTS.items() if mode != "affine"
        ]
    return [QuantizationSettings(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUP_SIZES]


def _present(path: str, tensors: Mapping[str, StoredTensor]) -> list[str]:
    return [suffix for suffix in ("weight", "scales", "biases") if f"{path}.{suffix}" in tensors]


def _alternatives(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
