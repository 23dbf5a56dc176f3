"""Where rows come from: a folder of files, a single file, or a Hub dataset. Nothing is read before it is asked for."""

import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..home import expand_home
from .data_settings import DataSettings
from .formats import Columns
from .rows import Row, read_rows

SUFFIXES = (".jsonl", ".json")
STEMS = {"train": ("train",), "valid": ("valid", "validation"), "test": ("test",)}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Rows of one file or one split of a Hub dataset. `rows` may be gone through once."""

    name: str
    rows: Generator[Row, None, None]
    columns: Columns


@dataclass(frozen=True)
class Sources:
    """The sources of each split that there is; `single` when train is expected to give validation its rows."""

    splits: dict[str, list[Source]]
    single: bool = False


def columns_of(settings: DataSettings) -> Columns:
    """The columns' names that hold for files."""
    return Columns(settings.prompt_feature, settings.completion_feature, settings.chat_feature, settings.text_feature)


def find_sources(settings: DataSettings, splits: Collection[str]) -> Sources:
    """What `data` or `hf_dataset` names, for the splits asked for. Raises DataError or HubError."""
    columns = columns_of(settings)
    if settings.data is None:
        from .hub_datasets import described_splits

        return Sources(described_splits(settings, splits, columns), single=True)
    path = expand_home(settings.data)
    if path.is_dir():
        files = {split: _file_in(path, split) for split in splits}
        found = {split: [_source(file, columns)] for split, file in files.items() if file}
        if not found:
            raise DataError(f"{path} has no {' or '.join(f'{split}.jsonl' for split in splits)}")
        return Sources(found)
    if path.exists():
        only = "train" if "train" in splits else next(iter(splits))
        return Sources({only: [_source(path, columns)]}, single=True)
    if path.suffix in (*SUFFIXES, ".txt", ".csv") or not _HUB_ID.fullmatch(settings.data):
        raise DataError(f"{path}: no such file or folder, and no name of a Hub dataset either")
    from .hub_datasets import named_splits

    return Sources(named_splits(settings, splits, columns))


def check_test_data(settings: DataSettings, *, trained: bool) -> None:
    """Raise DataError when files that are named hold nothing to test on; `trained`: all but test rows are trained on.

    A Hub dataset is not asked here, which would take as long as reading it.
    """
    path = expand_home(settings.data) if settings.data is not None else None
    if path is not None and path.is_dir():
        find_sources(settings, ("test",))
    elif path is not None and path.exists() and trained:
        raise DataError(f"{path} is one file, and its rows are trained on: to test too, name a folder with test.jsonl")


def _source(file: Path, columns: Columns) -> Source:
    return Source(file.name, read_rows(file), columns)


def _file_in(folder: Path, split: str) -> Path | None:
    """The split's file, if there is one. Raises DataError for two."""
    names = [stem + suffix for stem in STEMS[split] for suffix in SUFFIXES]
    found = [folder / name for name in names if (folder / name).exists()]
    if len(found) > 1:
        raise DataError(f"{folder} has both {found[0].name} and {found[1].name}: keep one")
    return found[0] if found else None
