"""Prompt-cache files: what is saved goes on as if it had never been saved, here and in mlx-lm."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from caching import IDS, KINDS, TINY, prefilled, saved, small_model, steps
from mlx.utils import tree_flatten
from reference import random_checkpoint, small_config

from openelm_mlx.checkpoint import load
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import GenerationError, OutputError
from openelm_mlx.generation import generate_step
from openelm_mlx.model import Model
from openelm_mlx.prompt import encode_chat
from openelm_mlx.prompt_cache import fingerprint, load_prompt_cache, rest_of_prompt, save_prompt_cache


@pytest.fixture(scope="module")
def small() -> Model:
    return small_model()


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "prompt.safetensors"


class TestRoundTrip:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("length", [3, 8, 14])
    def test_continues_as_if_never_saved(self, small, file, kind, length):  # fault D10
        saved(small, kind, IDS[:length], file)
        cache, ids = load_prompt_cache(file, small)
        assert ids == IDS[:length]
        assert np.array_equal(
            steps(small, IDS[length:], cache), steps(small, IDS[length:], prefilled(small, kind, ids))
        )

    @pytest.mark.parametrize("length", [3, 300])
    def test_padding_is_not_state(self, small, file, length):  # fault D10
        ids = (IDS * 20)[:length]
        saved(small, "plain", ids, file)
        assert {array.shape[2] for array in mx.load(str(file)).values() if array.ndim} == {length}
        cache, _ = load_prompt_cache(file, small)
        whole = np.array(small(mx.array([[*ids, 5, 6]]))[0, -2:])
        assert np.abs(steps(small, [5, 6], cache) - whole).max() < 1e-4

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_in_16_bits(self, file, kind, dtype):
        model = small_model()
        model.set_dtype(getattr(mx, dtype))
        saved(model, kind, IDS[:9], file)
        cache, _ = load_prompt_cache(file, model)
        for layer, other in zip(cache, prefilled(model, kind, IDS[:9]), strict=True):
            assert mx.array_equal(layer.keys, other.keys[:, :, : layer.keys.shape[2]])
        next_ = model(mx.array([[5]]), cache), model(mx.array([[5]]), prefilled(model, kind, IDS[:9]))
        assert mx.array_equal(*next_)

    def test_generation_goes_on_from_a_file(self, tiny, golden, file):
        model, _ = tiny
        ids = golden["ids_0"].tolist()
        save_prompt_cache(file, prefilled(model, "plain", ids[:3]), ids[:3], model)
        cache, _ = load_prompt_cache(file, model)
        assert list(generate_step(ids[3:], model, max_tokens=20, cache=cache)) == golden["greedy_0"][:20].tolist()


@pytest.fixture(scope="module")
def theirs():
    from mlx_lm.models.openelm import Model, ModelArgs

    config = small_config()
    model = Model(ModelArgs.from_dict(OpenELMConfig.from_dict(config).to_dict()))
    model.load_weights([(name, mx.array(value)) for name, value in random_checkpoint(config, seed=1).items()])
    model.eval()
    return model


@pytest.mark.needs_mlx_lm
class TestMlxLm:
    """Both programs go on from one file with the same logits, whoever wrote it."""

    @staticmethod
    def empty(kind):
        from mlx_lm.models import cache

        make = {
            "plain": cache.KVCache,
            "rotating": lambda: cache.RotatingKVCache(8, keep=2),
            "8 bits": lambda: cache.QuantizedKVCache(32, 8),
            "4 bits": lambda: cache.QuantizedKVCache(32, 4),
        }
        return [make[kind]() for _ in range(4)]

    # Their ring turns elsewhere, by how the text came: not yet, at once, in chunks, after chunks, step by step.
    TEXTS = (
        *(("rotating", chunks) for chunks in ([5], [14], [6, 7], [6, 7, 1, 1, 1], [1] * 12, [1] * 8, [9, 1])),
        *((kind, [6, 3]) for kind in ("plain", "8 bits", "4 bits")),
    )

    @pytest.mark.parametrize(("kind", "chunks"), TEXTS, ids=str)
    def test_we_read_theirs(self, small, theirs, file, kind, chunks):
        from mlx_lm.models.cache import save_prompt_cache as their_save

        cache, start = self.empty(kind), 0
        for length in chunks:
            theirs(mx.array([IDS[start : start + length]]), cache)
            start += length
        their_save(str(file), cache, {"model": "small"})
        ours, ids = load_prompt_cache(file, small)
        assert ids is None
        assert [layer.offset for layer in ours] == [start] * 4
        assert np.abs(steps(small, IDS[:6], ours) - steps(theirs, IDS[:6], cache)).max() < 1e-4

    @pytest.mark.parametrize(("kind", "chunks"), TEXTS, ids=str)
    def test_they_read_ours(self, small, theirs, file, kind, chunks):
        from mlx_lm.models.cache import load_prompt_cache as their_load

        ids = IDS[: sum(chunks)]
        saved(small, kind, ids, file, chunks[:-1])
        cache, metadata = their_load(str(file), return_metadata=True)
        assert metadata["model"] == "small"
        assert json.loads(metadata["tokenizer_config"]) == {}
        ours, _ = load_prompt_cache(file, small)
        assert np.abs(steps(small, IDS[:6], ours) - steps(theirs, IDS[:6], cache)).max() < 1e-4


class TestSaving:
    def test_a_failed_write_leaves_the_old_file(self, small, file, monkeypatch):
        saved(small, "plain", IDS[:3], file)
        before = file.read_bytes()

        def full(path, *_):
            Path(path).write_bytes(b"half")
            raise RuntimeError("[write] Unable to write 9 bytes to file.")

        monkeypatch.setattr(mx, "save_safetensors", full)
        with pytest.raises(OutputError, match="disk full"):
            saved(small, "plain", IDS[:5], file)
        assert file.read_bytes() == before
        assert list(file.parent.iterdir()) == [file]

    def test_an_older_cache_is_replaced_and_nothing_else(self, small, file):
        saved(small, "plain", IDS[:3], file)
        saved(small, "4 bits", IDS[:5], file)
        assert load_prompt_cache(file, small)[1] == IDS[:5]
        file.write_bytes(b"something dear to someone")
        with pytest.raises(OutputError, match="is no prompt cache, so it is not replaced"):
            saved(small, "plain", IDS[:3], file)
        assert file.read_bytes() == b"something dear to someone"

    @pytest.mark.parametrize(
        ("name", "words"),
        [("cache", "must end in .safetensors"), ("no/x.safetensors", "is no folder"), ("d.safetensors", "is a folder")],
    )
    def test_a_target_that_cannot_be(self, small, tmp_path, name, words):
        (tmp_path / "d.safetensors").mkdir()
        with pytest.raises(OutputError, match=words):
            saved(small, "plain", IDS[:3], tmp_path / name)

    def test_any_model_name(self, small, file):
        name = 'a "name"\\ \udce4 ü\n'
        save_prompt_cache(file, prefilled(small, "plain", IDS[:3]), IDS[:3], small, model_name=name)
        assert load_prompt_cache(file, small)[1] == IDS[:3]


class TestFingerprint:
    def test_is_the_numbers_whatever_their_dtype(self, small):
        narrow = small_model()
        narrow.set_dtype(mx.bfloat16)
        wide = small_model()
        wide.load_weights([(name, value.astype(mx.float32)) for name, value in _flat(narrow).items()])
        assert fingerprint(narrow) == fingerprint(wide) != fingerprint(small)
        assert fingerprint(small) == fingerprint(small_model())

    @pytest.mark.parametrize("name", ["transformer.layers.3.attn.out_proj.weight", "transformer.norm.weight"])
    def test_sees_a_change_of_any_parameter(self, small, name):
        other = small_model()
        other.load_weights([(name, _flat(other)[name] * 1.01)], strict=False)
        assert fingerprint(other) != fingerprint(small)


def _flat(model) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


class TestRestOfPrompt:
    @pytest.mark.parametrize(
        ("end", "instruct"), [("", False), ("s", False), (" of the sea", False), ("dom. And so", False), ("s", True)]
    )
    def test_the_answer_is_that_of_the_whole_prompt(self, tiny, end, instruct):
        """Also where the cached text's last word is cut otherwise once text follows."""
        model, tokenizer = tiny
        begin = "Once there was a king"

        def encode(text):
            return encode_chat(tokenizer, [{"role": "user", "content": text}]) if instruct else tokenizer.encode(text)

        held, prompt = encode(begin), encode(begin + end)
        held = held[: len(held) - 1 - held[::-1].index(tokenizer.eos_token_id)] if instruct else held
        cache = prefilled(model, "plain", held)
        rest = rest_of_prompt(cache, held, prompt, tokenizer)
        assert cache[0].offset + len(rest) == len(prompt)
        assert 1 <= len(rest) < len(prompt) - 3
        assert list(generate_step(rest, model, max_tokens=4, cache=cache)) == list(
            generate_step(prompt, model, max_tokens=4)
        )

    @pytest.mark.parametrize("prompt", ["a king of the sea", "Once there", "Once there was a queen"])
    def test_another_beginning_is_refused(self, tiny, prompt):
        model, tokenizer = tiny
        held = tokenizer.encode("Once there was a king")
        cache = prefilled(model, "plain", held)
        with pytest.raises(GenerationError, match=r"does not begin with the \d+ tokens .*'Once there was a king'"):
            rest_of_prompt(cache, held, tokenizer.encode(prompt), tokenizer)
        assert cache[0].offset == len(held)

    def test_a_turned_ring_cannot_go_back(self, tiny):
        model, tokenizer = tiny
        held = tokenizer.encode("Once upon a time there was a king who had no")
        with pytest.raises(GenerationError, match="cannot go back"):
            rest_of_prompt(prefilled(model, "rotating", held), held, held, tokenizer)
