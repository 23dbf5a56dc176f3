"""`openelm cache-prompt`, and the flags by which a generation gets its cache."""

import argparse
import json
from pathlib import Path

import mlx.core as mx
import pytest
from caching import IDS, TINY, saved, small_model

from openelm_mlx import cli
from openelm_mlx.cache_arguments import add_cache_arguments, cache_from_arguments, kept_tokens
from openelm_mlx.checkpoint import load
from openelm_mlx.errors import GenerationError
from openelm_mlx.generation import generate_step
from openelm_mlx.prompt import encode_chat
from openelm_mlx.prompt_cache import load_prompt_cache, rest_of_prompt


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


@pytest.fixture(scope="module")
def small():
    return small_model()


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "prompt.safetensors"


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
