"""Datasets of the Hub through a stand-in for the `datasets` library: names, mlx-lm's keys, limits, and no code run."""

import itertools
import sys
import types

import pytest
from chats import TINY

from openelm_mlx.errors import ConfigError, DataError, HubError
from openelm_mlx.lora.data_settings import DataSettings
from openelm_mlx.lora.datasets import load_datasets
from openelm_mlx.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(TINY)


def load(data=None, splits=("train", "valid"), **settings):
    return load_datasets(DataSettings(data=data, **settings), TOKENIZER, splits=splits, notify=lambda line: None)


def texts(sequences):
    return [TOKENIZER.decode(sequence.tokens.tolist()) for sequence in sequences]


class FakeLibrary(types.ModuleType):
    """What we use of `datasets`: two splits of rows without end, and a record of what was asked."""

    __version__ = "4.0.0"

    class config:
        HF_HUB_OFFLINE = False

    def __init__(self):
        super().__init__("datasets")
        self.asked, self.read = [], 0

    def get_dataset_split_names(self, path):
        if path == "no/one":
            raise FileNotFoundError("Dataset 'no/one' doesn't exist on the Hub")
        return ["train", "validation", "other"]

    def load_dataset(self, path, *, split, streaming, **config):
        self.asked.append((path, split, streaming, config))
        count = None if streaming else 20
        for number in itertools.count() if count is None else range(count):
            self.read += 1
            yield {"question": f"{split} {number}?", "answer": " Yes.", "text": f"{split} {number}"}


@pytest.fixture
def library(monkeypatch):
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


def test_a_dataset_by_name(library):
    data = load("some/set", offline=True)
    assert library.asked == [("some/set", "train", False, {}), ("some/set", "validation", False, {})]
    assert (len(data.train), len(data.valid)) == (20, 20)
    assert data.train[2].row == "some/set train, row 3"
    assert library.config.HF_HUB_OFFLINE
    library.config.HF_HUB_OFFLINE = False


def test_an_endless_one_is_read_to_the_limit(library):
    # fault E8
    data = load("some/set", max_rows=5)
    assert (len(data.train), len(data.valid), library.read) == (5, 5, 10)


def test_mlx_lms_keys(library):
    own = {"path": "some/set", "prompt_feature": "question", "completion_feature": "answer"}
    other = {"path": "other/set", "train_split": "train[:9]", "valid_split": "other", "config": {"name": "en"}}
    data = load(hf_dataset=[own, other])
    assert library.asked == [
        ("some/set", "train[:80%]", False, {}),
        ("other/set", "train[:9]", False, {"name": "en"}),
        ("some/set", "train[-10%:]", False, {}),
        ("other/set", "other", False, {"name": "en"}),
    ]
    assert texts(data.train)[0] == "train[:80%] 0? Yes."
    assert texts(data.train)[20] == "train[:9] 0"


def test_validation_is_never_part_of_a_whole_training_split(library):
    data = load(hf_dataset={"path": "some/set", "train_split": "train"})
    assert (len(data.train), len(data.valid)) == (18, 2)
    assert not set(texts(data.train)) & set(texts(data.valid))


@pytest.mark.parametrize(
    ("described", "told"),
    [
        ({}, "needs a path"),
        ([], "an empty list"),
        ({"path": "a/b", "trainsplit": "x"}, "got 'trainsplit'"),
        ({"path": "a/b", "config": {"trust_remote_code": True}}, "got trust_remote_code"),
        ({"path": "a/b", "train_split": 3}, "are names"),
    ],
)
def test_keys_that_mean_nothing(library, described, told):
    with pytest.raises(ConfigError, match=told):
        load(hf_dataset=described)


def test_what_the_library_says(library):
    with pytest.raises(HubError, match="no/one could not be loaded: Dataset 'no/one' doesn't exist"):
        load("no/one")
    with pytest.raises(DataError, match="has the splits train, validation, other; expected test"):
        load("some/set", ["test"])


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"need the extra: pip install 'openelm-mlx\[datasets\]'"):
        load("some/set")


def test_one_that_would_run_code(library, monkeypatch):
    monkeypatch.setattr(FakeLibrary, "__version__", "3.6.0")
    with pytest.raises(DataError, match="datasets>=4"):
        load("some/set")
