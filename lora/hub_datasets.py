"""Datasets of the Hub, through the `datasets` library (an extra), by a name or by mlx-lm's `hf_dataset` keys.

The library is asked for data only: no code of a dataset runs (it cannot from version 4 on, older ones are refused).
With a row limit a dataset is streamed, so that no more is fetched than is used.
"""

from collections.abc import Callable, Collection, Generator, Mapping
from importlib import import_module
from typing import Any

from ..errors import ConfigError, DataError, HubError
from .data_settings import DataSettings
from .data_sources import STEMS, Source
from .formats import Columns
from .rows import Row

# mlx-lm's, for hf_dataset. The second only beside the first: after "train" its rows would be trained on.
DEFAULT_TRAIN, DEFAULT_VALID = "train[:80%]", "train[-10%:]"
_FEATURES = ("prompt_feature", "completion_feature", "chat_feature", "text_feature")
_KEYS = {"path", "train_split", "valid_split", "test_split", "config", *_FEATURES}
_CONFIG_KEYS = {"name", "revision", "data_dir", "data_files"}


def named_splits(settings: DataSettings, splits: Collection[str], columns: Columns) -> dict[str, list[Source]]:
    """The splits of the dataset that `data` names."""
    path = settings.data
    assert path is not None
    library = _library(settings, path)
    present = _asked(path, lambda: library.get_dataset_split_names(path))
    names = {split: next((name for name in STEMS[split] if name in present), None) for split in splits}
    found = {split: [_source(library, settings, path, name, {}, columns)] for split, name in names.items() if name}
    if not found:
        raise DataError(f"the dataset {path} has the splits {', '.join(present)}; expected {' or '.join(splits)}")
    return found


def described_splits(settings: DataSettings, splits: Collection[str], columns: Columns) -> dict[str, list[Source]]:
    """The splits of all datasets that `hf_dataset` describes, one after the other."""
    described = settings.hf_dataset if isinstance(settings.hf_dataset, list) else [settings.hf_dataset]
    if not described:
        raise ConfigError("hf_dataset is an empty list: expected a mapping with path, or several")
    found: dict[str, list[Source]] = {}
    for entry in described:
        path, config, own = _checked(entry, columns)
        library = _library(settings, path)
        names = {split: entry.get(f"{split}_split") for split in splits}
        if not entry.get("train_split"):
            names |= {"train": DEFAULT_TRAIN, "valid": names.get("valid") or DEFAULT_VALID}
        for split, name in names.items():
            if split in splits and name is not None:
                found.setdefault(split, []).append(_source(library, settings, path, name, config, own))
    return found


def _checked(entry: Any, columns: Columns) -> tuple[str, dict[str, Any], Columns]:
    """An entry's dataset, what load_dataset gets besides, and its columns. Raises ConfigError."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise ConfigError(f"hf_dataset needs a path, the dataset's name on the Hub; got {entry!r}")
    unknown = sorted(map(str, set(entry) - _KEYS))
    config = entry.get("config") or {}
    if unknown or not isinstance(config, Mapping):
        raise ConfigError(f"hf_dataset knows {', '.join(sorted(_KEYS))}; got {unknown[0] if unknown else config!r}")
    refused = sorted(map(str, set(config) - _CONFIG_KEYS))
    if refused:
        raise ConfigError(f"hf_dataset: config knows {', '.join(sorted(_CONFIG_KEYS))}; got {refused[0]}")
    features = {key: entry.get(key, getattr(columns, key)) for key in _FEATURES}
    names = [entry[key] for key in _KEYS - {"config"} if key in entry]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"hf_dataset: splits and features are names, got {entry!r}")
    return entry["path"], dict(config), Columns(**features)


def _library(settings: DataSettings, path: str) -> Any:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise DataError(
            f"{path} is no file or folder here, and Hub datasets need the extra: pip install 'openelm-mlx[datasets]'"
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise DataError(f"datasets {datasets.__version__} may run code of a dataset: pip install 'datasets>=4'")
    if settings.offline:
        datasets.config.HF_HUB_OFFLINE = True
    return datasets


def _source(
    library: Any, settings: DataSettings, path: str, split: str, config: dict[str, Any], columns: Columns
) -> Source:
    streaming = settings.max_rows is not None and "[" not in split  # a slice is a limit of its own

    def rows() -> Generator[Row, None, None]:
        loaded = _asked(path, lambda: iter(library.load_dataset(path, split=split, streaming=streaming, **config)))
        number = 0
        while (value := _asked(path, lambda: next(loaded, None))) is not None:
            number += 1
            yield Row(dict(value), f"{path} {split}, row {number}")

    return Source(f"{path} {split}", rows(), columns)


def _asked(path: str, ask: Callable[[], Any]) -> Any:
    """What the library answers. Raises HubError with its reason: it can fail in the ways of many libraries."""
    try:
        return ask()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise HubError(f"the dataset {path} could not be loaded: {reason[:300]}") from None
