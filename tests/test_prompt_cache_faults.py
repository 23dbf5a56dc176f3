"""Prompt-cache files that are damaged, hostile or another model's: one line that names the file and says what to do."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from caching import IDS, KINDS, TINY, saved, small_model, steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openelm_mlx.errors import CheckpointError
from openelm_mlx.model import Model
from openelm_mlx.prompt_cache import load_prompt_cache


@pytest.fixture(scope="module")
def small() -> Model:
    return small_model()


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "prompt.safetensors"


def changed(path: Path, change) -> None:
    """Save a file again after `change(arrays, metadata)`."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    change(arrays, metadata)
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays, metadata)


def number(name, value):
    return lambda arrays, metadata: arrays.update({name: mx.array(value)})


def noted(name, value):
    return lambda arrays, metadata: metadata.update({name: value})


def shortened(name):
    return lambda arrays, metadata: arrays.update({name: arrays[name][:, :, 1:]})


DAMAGES = {
    "offset beyond what is held": ("plain", number("1.2", 99), "layer 1 has 99 as number 2, which must lie between 1"),
    "offset 0": ("plain", number("0.2", 0), "must lie between 1 and 12"),
    "offset negative": ("plain", number("0.2", -1), "must lie between 1 and 12"),
    "offset fractional": ("plain", number("0.2", 1.5), "float32 of shape"),
    "offset a list": ("plain", number("0.2", [1, 2]), "where number 2 belongs"),
    "layers of different lengths": ("plain", number("3.2", 11), "different lengths"),
    "no values": ("plain", lambda arrays, _: arrays.pop("2.1"), "layer 2 lacks '2.1'"),
    "values shorter than keys": ("plain", shortened("1.1"), "layer 1 has keys and values of different lengths"),
    "a tensor too many": ("plain", number("0.7", 1), "'0.7', which is no part"),
    "two texts": ("plain", number("0.0", np.zeros((2, 1, 12, 32), np.float32)), "layer 0 has shape"),
    "flat": ("plain", number("0.0", np.zeros(7, np.float32)), "layer 0 has shape"),
    "16 bits": ("plain", number("0.0", mx.zeros((1, 1, 12, 32), mx.bfloat16)), "bfloat16, .* needs float32: .*--dtype"),
    "another class": ("plain", noted("1.2", "ArraysCache"), "layer 2 is a 'ArraysCache'; expected KVCache, Rot"),
    "a class too many": ("plain", noted("1.4", "KVCache"), "of a model of 5 layers, this one has 4"),
    "no classes": ("plain", lambda _, metadata: [metadata.pop(f"1.{i}") for i in range(4)], "is no prompt cache"),
    "ids that are no list": ("plain", noted("0.ids", "12"), "does not say which 12 tokens"),
    "ids nested deeply": ("plain", noted("0.ids", "[" * 10**5), "does not say which 12 tokens"),
    "too few ids": ("plain", noted("0.ids", "[1, 2]"), "does not say which 12 tokens"),
    "ids outside the vocabulary": ("plain", noted("0.ids", str([256] * 12)), "does not say which 12 tokens"),
    "other weights": ("plain", noted("0.fingerprint", "0"), "made with other weights, .* by the name of 'small'"),
    "all of it kept": ("rotating", number("0.3", 8), "layer 0 has 8 as number 3, which must lie between 0 and 7"),
    "no room": ("rotating", number("0.4", 0), "must lie between 1"),
    "far positions": ("rotating", number("0.2", 2**31 - 1), "must lie between 1"),
    "next slot beyond the ring": ("rotating", number("0.5", 9), "must lie between 1 and 8"),
    "next slot among the kept": ("rotating", number("0.5", 1), "layer 0 holds 8 of 12 tokens in a ring of 8"),
    "tokens missing": ("rotating", number("0.4", 10), "layer 0 holds 8 of 12 tokens in a ring of 10"),
    "tokens never seen": ("rotating", number("0.2", 3), "layer 0 holds 6 of 3|layer 0 holds 8 of 3"),
    "values shorter in the ring": ("rotating", shortened("0.1"), "different lengths"),
    "3 bits": ("4 bits", number("0.4", 3), "between 4 and 8"),
    "5 bits": ("4 bits", number("0.4", 5), "layer 0 is quantised to 5 bits in groups of 32"),
    "odd groups": ("4 bits", number("0.3", 7), "in groups of 7"),
    "8 bits in the room of 4": ("4 bits", number("0.4", 8), "layer 0 has shape"),
    "scales shorter than codes": ("4 bits", shortened("0.0.1"), "codes and scales of different lengths"),
}


class TestRefused:
    @pytest.mark.parametrize(("kind", "damage", "words"), DAMAGES.values(), ids=DAMAGES.keys())
    def test_damage(self, small, file, kind, damage, words):
        saved(small, kind, IDS[:12], file)
        changed(file, damage)
        with pytest.raises(CheckpointError, match=words) as caught:
            load_prompt_cache(file, small)
        assert str(caught.value).startswith(str(file))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("model", "words"),
        [
            ({"seed": 2}, "other weights"),
            ({"num_transformer_layers": 3}, "of a model of 4 layers, this one has 3"),
            ({"num_gqa_groups": 1}, "other weights"),
        ],
    )
    def test_another_model(self, small, file, kind, model, words):
        saved(small, kind, IDS[:12], file)
        with pytest.raises(CheckpointError, match=words):
            load_prompt_cache(file, small_model(**model))

    @pytest.mark.parametrize("kind", KINDS)
    def test_other_heads_without_a_fingerprint(self, small, file, kind):
        """As mlx-lm writes it."""
        saved(small, kind, IDS[:12], file)
        changed(file, lambda _, metadata: metadata.pop("0.fingerprint"))
        words = r"layer 0 has shape \(1, 1, .* this model needs \(1, 2, tokens, .*another model"
        with pytest.raises(CheckpointError, match=words):
            load_prompt_cache(file, small_model(num_gqa_groups=1))

    @pytest.mark.parametrize(
        ("content", "words"),
        [(b"", "empty"), (b"<html>", "web page"), (b"{}", "cut short"), (None, "cut short|shorter")],
    )
    def test_no_safetensors(self, small, file, content, words):
        saved(small, "plain", IDS[:12], file)
        file.write_bytes(file.read_bytes()[:-9] if content is None else content)
        with pytest.raises(CheckpointError, match=words):
            load_prompt_cache(file, small)

    def test_weights_and_nothing(self, small, file):
        with pytest.raises(CheckpointError, match="is no prompt cache; make one with `openelm cache-prompt`"):
            load_prompt_cache(TINY / "model.safetensors", small)
        with pytest.raises(CheckpointError, match="cannot read"):
            load_prompt_cache(file, small)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
    @given(data=st.data(), kind=st.sampled_from(list(KINDS)))
    def test_a_changed_header_is_refused_or_harmless(self, small, tmp_path, data, kind):
        path = tmp_path / f"{kind}.safetensors"
        if not path.exists():
            saved(small, kind, IDS[:12], path)
        content = bytearray(path.read_bytes())
        header_bytes = int.from_bytes(content[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, header_bytes + 7))] = data.draw(st.integers(0, 255))
        other = tmp_path / "other.safetensors"
        other.write_bytes(content)
        try:
            cache, _ = load_prompt_cache(other, small)
        except CheckpointError:
            return
        assert steps(small, [5], cache).shape == (1, 256)
