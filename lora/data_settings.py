"""The options that say what is trained on: one frozen record from YAML keys and flags, checked before any work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError

LONG_ROWS = ("cut", "split", "skip")
DEFAULT_VAL_SPLIT = 0.1


@dataclass(frozen=True)
class DataSettings:
    """What `openelm lora` needs to know to make training sequences. YAML keys have the same names."""

    data: str | None = None  # a folder, a file, or a Hub dataset's id
    val_split: float | None = None  # share of train for validation; a single file's default is DEFAULT_VAL_SPLIT
    mask_prompt: bool = False
    max_seq_length: int = 2048  # tokens, BOS and EOS included
    long_rows: str = "cut"
    max_rows: int | None = None  # of each file or split
    text_eos: bool = True
    pack: bool = False
    seed: int = 0
    offline: bool = False
    prompt_feature: str = "prompt"
    completion_feature: str = "completion"
    chat_feature: str = "messages"
    text_feature: str = "text"
    hf_dataset: Any = None  # mlx-lm's mapping, or a list of them

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "DataSettings":
        """From merged YAML and flags; other keys are left to others, None means not given. Raises ConfigError."""
        known = {field.name: field for field in fields(cls)}
        given = {key: value for key, value in values.items() if key in known and value is not None}
        for key, value in given.items():
            _check_type(key, value, known[key].type)
        settings = cls(**given)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.data is None and self.hf_dataset is None:
            raise ConfigError("no training data: name a folder, a file or a Hub dataset with --data")
        if self.data is not None and self.hf_dataset is not None:
            raise ConfigError("data and hf_dataset both name training data: drop one")
        if self.val_split is not None and not (math.isfinite(self.val_split) and 0 <= self.val_split < 1):
            raise ConfigError(f"val_split is a share of the rows, from 0 to below 1, got {self.val_split}")
        if self.max_seq_length < 2:
            raise ConfigError(f"max_seq_length must be 2 tokens or more, got {self.max_seq_length}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ConfigError(f"max_rows must be 1 or more, got {self.max_rows}")
        if self.long_rows not in LONG_ROWS:
            raise ConfigError(f"long_rows must be one of {', '.join(LONG_ROWS)}, got {self.long_rows!r}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")


def _check_type(key: str, value: Any, annotation: Any) -> None:
    wanted: dict[Any, tuple[type, ...]] = {
        str: (str,),
        str | None: (str,),
        bool: (bool,),
        int: (int,),
        int | None: (int,),
        float | None: (int, float),
        Any: (dict, list),
    }
    types = wanted[annotation]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join(kind.__name__ for kind in types)
        raise ConfigError(f"{key} must be {names}, got {value!r}")
