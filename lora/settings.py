"""What a run of `openelm lora` is asked for: mlx-lm's keys and ours, from recipe, YAML and flags, in one frozen record.

A flag overrides the YAML file, which overrides the recipe, which overrides the defaults. A key that means nothing is
an error that names the nearest ones: a misspelt key would otherwise train something else for hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..adapter_config import EMBEDDING_KINDS, FINE_TUNE_TYPES, AdapterSpec, read_lora_parameters
from ..config_keys import listing, short
from ..errors import ConfigError
from ..home import expand_home
from ..model_arguments import DTYPES
from .data_settings import DataSettings

OPTIMIZERS = ("adam", "adamw", "sgd", "adafactor", "muon")
_DEFAULT_SCALE = 20.0
_DEFAULT_RANK = 8
_PARAMETERS = ("rank", "scale", "alpha", "dropout", "keys", "rslora", "input_embedding")  # of lora_parameters


@dataclass(frozen=True)
class Settings:
    """Everything but the data, which is `data`. Iterations are batches; `grad_accumulation_steps` of them an update."""

    data: DataSettings
    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    offline: bool = False
    dtype: str = "auto"
    keep_quantized: bool = False
    train: bool | None = None  # None: unless only --test was asked for
    test: bool = False
    fine_tune_type: str = "lora"
    num_layers: int = -1  # counted from the last; -1 is all
    lora_parameters: Mapping[str, Any] = field(default_factory=dict)
    embedding: str = "none"
    optimizer: str = "adam"
    optimizer_config: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-5
    lr_schedule: Mapping[str, Any] | None = None
    batch_size: int = 4
    iters: int = 1000
    epochs: float | None = None  # instead of iters
    grad_accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    z_loss: float = 0.0
    grad_checkpoint: bool = False
    val_batches: int = 25  # -1 is all
    test_batches: int = 500
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_every: int = 100
    early_stopping: int | None = None  # validations without a gain
    adapter_path: str = "adapters"
    resume_adapter_file: str | None = None
    seed: int = 0
    clear_cache_threshold: int = 0  # bytes
    report_to: str | None = None
    project_name: str | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Settings":
        """From merged YAML and flags; None means not given. Raises one ConfigError listing every bad value."""
        known = {each.name: each for each in fields(cls) if each.name != "data"}
        given = {key: value for key, value in values.items() if key in known and value is not None}
        faults = [fault for key, value in given.items() if (fault := _type_fault(key, value, known[key].type))]
        if faults:
            raise ConfigError(listing(faults))
        for key in ("adapter_path", "resume_adapter_file"):
            if given.get(key):
                given[key] = str(expand_home(given[key]))
        settings = cls(data=DataSettings.from_values(values), **given)
        settings._check()
        return settings

    @property
    def trains(self) -> bool:
        return not self.test if self.train is None else self.train

    def adapter_spec(self) -> AdapterSpec:
        """Which layers are adapted, and how. Raises ConfigError for what `lora_parameters` may not say."""
        parameters = dict(self.lora_parameters)
        if parameters.get("scale") is None and parameters.get("alpha") is None:
            parameters["scale"] = _DEFAULT_SCALE
        if parameters.get("rank") is None:
            parameters["rank"] = _DEFAULT_RANK
        faults = [f"unknown key {short(key)}" for key in parameters if key not in _PARAMETERS]
        if faults:
            faults.append(f"known are {', '.join(_PARAMETERS)}")
        if parameters.get("rslora") and parameters.get("alpha") is None:
            faults.append("rslora divides alpha by the root of the rank: give alpha, not scale")
        read = read_lora_parameters(parameters, faults)
        if read["scale"] == 0:
            faults.append("scale and alpha must not be 0, which would learn nothing")
        if faults:
            raise ConfigError(f"lora_parameters: {listing(faults)}")
        base = self.model or "tiny"
        if self.fine_tune_type == "full":
            whole = ("transformer.token_embeddings",) if self.embedding == "both" else ()
            return AdapterSpec(self.num_layers, "full", keys=(*whole, *self._whole_modules()), base_model=base)
        spec = AdapterSpec(self.num_layers, self.fine_tune_type, **read, base_model=base)
        return spec if self.embedding == "none" else spec.with_embedding(self.embedding)

    def _whole_modules(self) -> tuple[str, ...]:
        """Full fine-tuning of every layer takes the final norm too, as it takes the norms of the layers."""
        return ("transformer.norm",) if self.num_layers <= 0 else ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what a run was asked for, so that it can be resumed and repeated."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "data"}
        return {**own, **vars(self.data)}

    def _check(self) -> None:
        faults = [
            f"{name} must be 1 or more, got {getattr(self, name)}"
            for name in ("batch_size", "iters", "grad_accumulation_steps", "steps_per_report", "steps_per_eval",
                         "save_every", "early_stopping")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]  # fmt: skip
        for name, choices in (
            ("fine_tune_type", FINE_TUNE_TYPES),
            ("optimizer", OPTIMIZERS),
            ("embedding", EMBEDDING_KINDS),
            ("dtype", DTYPES),
        ):
            if getattr(self, name) not in choices:
                faults.append(f"{name} must be one of {', '.join(choices)}, got {short(getattr(self, name))}")
        for name in ("learning_rate", "epochs", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                faults.append(f"{name} must be above 0, got {value}")
        if not 0 <= self.z_loss < 1:
            faults.append(f"z_loss must be at least 0 and below 1, got {self.z_loss}")
        if self.num_layers == 0:
            faults.append("num_layers is 0, so nothing would be trained; use -1 for all layers")
        if self.embedding == "input" and self.fine_tune_type == "full":
            faults.append("embedding input is an adapter's; with fine_tune_type full use both or none")
        for name in ("val_batches", "test_batches"):
            if getattr(self, name) < -1:
                faults.append(f"{name} must be -1 (all) or more, got {getattr(self, name)}")
        if self.test_batches == 0:
            faults.append("test_batches must be -1 (all) or 1 or more, got 0; leave out --test to test nothing")
        if self.seed >= 2**24:
            faults.append(f"seed must be below {2**24}, got {self.seed}")
        if faults:
            raise ConfigError(listing(faults))


def known_keys() -> tuple[str, ...]:
    """Every key that a YAML file may have."""
    names = [each.name for each in fields(Settings)] + [each.name for each in fields(DataSettings)]
    return tuple(dict.fromkeys(names))


def _type_fault(key: str, value: Any, annotation: Any) -> str | None:
    types: dict[Any, Any] = {
        str: str, str | None: str, bool: bool, bool | None: bool, int: int, int | None: int,
        float: (int, float), float | None: (int, float),
    }  # fmt: skip
    wanted = types.get(annotation, Mapping)
    if isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
        return None
    names: dict[Any, str] = {bool: "true or false", int: "a whole number", str: "a text", Mapping: "a mapping"}
    return f"{key} must be {names.get(wanted, 'a number')}, got {short(value)}"
