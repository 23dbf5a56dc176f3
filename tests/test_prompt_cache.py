"""Prompt-cache files: what is saved goes on as if it had never been saved, here and in mlx-lm; bad ones are refused."""

import argparse
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import random_checkpoint, small_config

from openelm_mlx import cli
from openelm_mlx.cache_arguments import add_cache_arguments, cache_from_arguments, kept_tokens
from openelm_mlx.caches import make_cache
from openelm_mlx.checkpoint import load
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import CheckpointError, GenerationError, OutputError
from openelm_mlx.generation import generate_step
from openelm_mlx.model import Model
from openelm_mlx.prompt import encode_chat
from openelm_mlx.prompt_cache import fingerprint, load_prompt_cache, rest_of_prompt, save_prompt_cache

TINY = Path(__file__).parent.parent / "openelm_mlx" / "data" / "tiny"
KINDS = {
    "plain": {},
    "rotating": {"max_kv_size": 8, "keep": 2},
    "8 bits": {"kv_bits": 8},
    "4 bits": {"kv_bits": 4},
}
IDS = [1, 9, 4, 4, 20, 7, 8, 15, 3, 30, 11, 6, 40, 41, 42, 43, 44, 45, 46, 47]


def small_model(seed: int = 1, **changes) -> Model:
    config = small_config(**changes)
    model = Model(OpenELMConfig.from_dict(config))
    model.load_weights([(name, mx.array(value)) for name, value in random_checkpoint(config, seed=seed).items()])
    model.eval()
    return model


@pytest.fixture(scope="module")
def small() -> Model:
    return small_model()


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "prompt.safetensors"


def prefilled(model, kind: str, ids: list[int], chunks=()):
    cache, start = make_cache(model, **KINDS[kind]), 0
    for length in [*chunks, len(ids) - sum(chunks)]:
        model(mx.array([ids[start : start + length]]), cache)
        start += length
    return cache


def steps(model, ids: list[int], cache) -> np.ndarray:
    """Logits (L, V) of ids run one by one."""
    return np.array(mx.concatenate([model(mx.array([[token]]), cache)[0] for token in ids]))


def saved(model, kind: str, ids: list[int], path: Path, chunks=()) -> None:
    save_prompt_cache(path, prefilled(model, kind, ids, chunks), ids, model, model_name="small")


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
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


class TestRestOfPrompt:
    @pytest.mark.parametrize("end", ["", "s", " of the sea", "dom. And so"])
    @pytest.mark.parametrize("instruct", [False, True])
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


class TestCommand:
    @pytest.mark.parametrize("flags", [[], ["--kv-bits", "8"], ["--max-kv-size", "64"]], ids=str)
    def test_a_file_to_continue_from(self, tiny, file, capsys, flags):
        model, tokenizer = tiny
        text = "Once upon a time there was a king who"
        arguments = ["cache-prompt", "--model", str(TINY), "--dtype", "float32", "-p", text]
        assert cli.main([*arguments, "--prompt-cache-file", str(file), *flags]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"{file}: 10 tokens" in captured.err
        cache, ids = load_prompt_cache(file, model)
        prompt = tokenizer.encode(text + " had three sons")
        rest = rest_of_prompt(cache, ids, prompt, tokenizer)
        assert len(rest) < 6
        assert list(generate_step(rest, model, max_tokens=4, cache=cache)) == list(
            generate_step(prompt, model, max_tokens=4)
        )

    def test_an_instruct_message_stays_open(self, tiny, file):
        _, tokenizer = tiny
        cli.main(["cache-prompt", "--model", str(TINY), "--instruct", "-p", "Hello", "--prompt-cache-file", str(file)])
        ids = json.loads(mx.load(str(file), return_metadata=True)[1]["0.ids"])
        whole = encode_chat(tokenizer, [{"role": "user", "content": "Hello"}])
        assert ids == whole[: len(ids)]
        assert whole[len(ids)] == tokenizer.eos_token_id
        assert ids.count(tokenizer.eos_token_id) == 1

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["-p", ""], "empty"),
            (["-p", "word " * 300], "context is 256|context of 256"),
            (["-p", "x", "--kv-bits", "5"], "4 or 8"),
            (["-p", "x", "--kv-bits", "4", "--max-kv-size", "9"], "not both"),
            (["-p", "x", "--max-kv-size", "1"], "give 2 or more"),
            ([], "--prompt"),
        ],
    )
    def test_bad_input_is_one_line(self, file, capsys, flags, words):
        try:
            status = cli.main(["cache-prompt", "--model", str(TINY), "--prompt-cache-file", str(file), *flags])
        except SystemExit as exit:
            status = exit.code
        error = capsys.readouterr().err
        assert status == 2
        assert error.count("\n") == 1
        assert any(word in error for word in words.split("|"))
        assert not file.exists()


class TestArguments:
    def parsed(self, *flags):
        parser = argparse.ArgumentParser()
        add_cache_arguments(parser)
        return parser.parse_args(flags)

    def test_flags_make_caches(self, small, file):
        for flags, kind in (
            ([], "KVCache"),
            (["--max-kv-size", "9"], "RotatingKVCache"),
            (["--kv-bits", "4"], "Quantize"),
        ):
            cache, ids = cache_from_arguments(self.parsed(*flags), small, keep=3)
            assert type(cache[0]).__name__.startswith(kind)
            assert getattr(cache[0], "keep", 3) == 3
            assert ids == []
        saved(small, "plain", IDS[:4], file)
        cache, ids = cache_from_arguments(self.parsed("--prompt-cache-file", str(file)), small, keep=3)
        assert (cache[0].offset, ids) == (4, IDS[:4])

    @pytest.mark.parametrize("flag", ["--max-kv-size", "--kv-bits"])
    def test_a_file_has_its_kind(self, small, file, flag):
        with pytest.raises(GenerationError, match="of one kind already"):
            cache_from_arguments(self.parsed("--prompt-cache-file", str(file), flag, "8"), small, keep=1)

    def test_what_a_bounded_cache_keeps(self, tiny):
        _, tokenizer = tiny
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        ids = encode_chat(tokenizer, messages)
        kept = kept_tokens(ids, tokenizer.eos_token_id)
        assert tokenizer.decode(ids[:kept]) == "<|system|>\nBe brief."
        assert kept_tokens(tokenizer.encode("Hello"), tokenizer.eos_token_id) == 1
