"""`openelm generate` beyond the plain prompt: JSON lines, logprobs, begun answers, caches, drafts, files of prompts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_cli import PROMPT, TINY, openelm, refused

from openelm_mlx import decoder, generate_command
from openelm_mlx.checkpoint import load
from openelm_mlx.prompt import encode_chat

PLAIN = ("generate", "--model", TINY, "-p", PROMPT, "-m", "30", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, dtype="float32")


def record(capsys, *arguments):
    return json.loads(openelm(capsys, *arguments, "--json")[1])


def test_json_lines_are_the_tokens_and_then_the_whole(capsys):
    *lines, whole = map(json.loads, openelm(capsys, *PLAIN, "--jsonl")[1].splitlines())
    assert [line["token"] for line in lines] == whole["tokens"]
    assert "".join(line["text"] for line in lines) == whole["text"]
    assert whole["tokens"] == record(capsys, *PLAIN)["tokens"]


def test_logprobs_are_the_models_own(capsys, golden):
    found = record(capsys, *PLAIN, "--logprobs", "3")["logprobs"]
    logits = golden["logits_0"][-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs)[:3]
    assert [token for token, _ in found[0]["top"]] == best.tolist()
    assert np.allclose([value for _, value in found[0]["top"]], logprobs[best], atol=1e-4)
    assert all(step["logprob"] == step["top"][0][1] for step in found)  # greedy says the likeliest


def test_logprobs_are_those_before_a_penalty(capsys):
    plain, penalised = (
        record(capsys, *PLAIN, "--logprobs", "1", *flags) for flags in ((), ("--repetition-penalty", "9"))
    )
    assert plain["logprobs"][0]["top"] == penalised["logprobs"][0]["top"]


def test_min_tokens_keeps_eos_away(capsys, monkeypatch):
    eos = record(capsys, *PLAIN)["tokens"][0]
    monkeypatch.setattr("openelm_mlx.tokenizer.Tokenizer.eos_token_ids", property(lambda _: {eos}))
    assert record(capsys, *PLAIN)["tokens"] == [eos]
    assert eos not in record(capsys, *PLAIN, "--min-tokens", "5")["tokens"][:5]


def test_the_instruct_form_and_a_begun_answer(tiny, capsys):
    _, tokenizer = tiny
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    flags = ("generate", "--model", TINY, "-m", "1", "-p", "Hi", "--instruct", "--system-prompt", "Be brief.")
    assert record(capsys, *flags)["prompt_tokens"] == len(encode_chat(tokenizer, messages))
    begun = [*encode_chat(tokenizer, messages)[:-1], *tokenizer.encode_segment("\n<|assistant|>\nYes")[-1:]]
    assert record(capsys, *flags, "--prefill-response", "Yes")["prompt_tokens"] >= len(begun)


def test_a_begun_answer_on_a_base_model_is_text(capsys):
    whole = record(capsys, *PLAIN[:4], PROMPT + " had", *PLAIN[5:])
    assert record(capsys, *PLAIN, "--prefill-response", " had")["tokens"] == whole["tokens"]


@pytest.mark.parametrize(
    "flags", [("--prompt-lookup", "4"), ("--draft-model", TINY), ("--draft-model", TINY, "--num-draft-tokens", "5")]
)
def test_drafts_change_nothing_but_the_time(capsys, flags):
    fast = record(capsys, *PLAIN, *flags)
    assert fast["tokens"] == record(capsys, *PLAIN)["tokens"]
    assert 0 <= fast["drafts"]["accepted"] <= fast["drafts"]["proposed"]


@pytest.mark.parametrize("flags", [("--kv-bits", "8"), ("--max-kv-size", "64")])
def test_other_caches(capsys, flags):
    assert record(capsys, *PLAIN, *flags)["tokens"][:5] == record(capsys, *PLAIN)["tokens"][:5]


def test_a_prompt_cache_saves_the_prefill(capsys, tmp_path):
    file = str(tmp_path / "king.safetensors")
    openelm(
        capsys, "cache-prompt", "--model", TINY, "--dtype", "float32", "-p", PROMPT[:25], "--prompt-cache-file", file
    )
    continued = record(capsys, *PLAIN, "--prompt-cache-file", file)
    assert continued["tokens"] == record(capsys, *PLAIN)["tokens"]
    assert continued["prompt_tokens"] < record(capsys, *PLAIN)["prompt_tokens"]


@pytest.mark.parametrize(("name", "text"), [
    ("prompts.txt", f"{PROMPT}\n\nThe old wolf\n"),
    ("prompts.jsonl", json.dumps(PROMPT) + "\n" + json.dumps({"prompt": "The old wolf"}) + "\n"),
])  # fmt: skip
def test_a_file_of_prompts(capsys, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    flags = ("generate", "--model", TINY, "--dtype", "float32", "-m", "12")
    status, out, err = openelm(capsys, *flags, "--prompts-file", str(tmp_path / name), "--batch-size", "2", "--json")
    results = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [result["index"] for result in results] == [0, 1]
    assert [r["text"] for r in results] == [record(capsys, *flags, "-p", p)["text"] for p in (PROMPT, "The old wolf")]
    assert "tokens/s together" in err
    assert openelm(capsys, *flags, "--prompts-file", str(tmp_path / name))[1].startswith("== 1: Once upon")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--logprobs", "2"), "--json"),
        (("--logprobs", "0", "--json"), "logprobs must be 1 or more"),
        (("--logprobs", "2", "--json", "--prompt-lookup", "3"), "--prompt-lookup"),
        (("--min-tokens", "31"), "min_tokens"),
        (("--draft-model", TINY, "--prompt-lookup", "3"), "not allowed with"),
        (("--system-prompt", "x"), "--instruct"),
        (("--kv-bits", "3"), "kv_bits must be 4 or 8"),
        (("--max-kv-size", "1"), "max_kv_size"),
        (("--prompt-cache-file", "nowhere.safetensors"), "nowhere.safetensors"),
    ],
)
def test_flags_that_make_no_sense(capsys, flags, words):
    assert words in refused(capsys, *PLAIN, *flags)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "", "no prompts"),
        ("a.jsonl", '"ok"\n{"prompt": 3}\n', "line 2: expected a string"),
        ("a.jsonl", '"ok"\n{"pro', "line 2 is not JSON"),
        ("none.txt", None, "cannot read"),
    ],
)
def test_a_bad_file_of_prompts_names_the_line(capsys, tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert words in refused(capsys, "generate", "--model", TINY, "--prompts-file", str(tmp_path / name))


def test_what_a_batch_cannot_do_is_refused(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for flags in (("--kv-bits", "8"), ("--prompt-lookup", "2"), ("--min-tokens", "2")):
        assert flags[0] in refused(
            capsys, "generate", "--model", TINY, "--prompts-file", str(tmp_path / "a.txt"), *flags
        )


def test_the_penalty_sees_what_the_prompt_cache_holds(capsys, tmp_path):
    file = str(tmp_path / "king.safetensors")
    openelm(
        capsys, "cache-prompt", "--model", TINY, "--dtype", "float32", "-p", PROMPT[:25], "--prompt-cache-file", file
    )
    penalised = (*PLAIN, "--repetition-penalty", "3")
    assert record(capsys, *penalised, "--prompt-cache-file", file)["tokens"] == record(capsys, *penalised)["tokens"]


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_the_decoder_changes_nothing_and_is_told(capsys, kind, golden):
    _, out, err = openelm(capsys, *PLAIN, "--decoder", kind, "--verbose", "--json")
    assert json.loads(out)["tokens"] == golden["greedy_0"][:30].tolist()
    assert f"decoder     {kind}" in err


def test_the_decoders_are_the_librarys():
    assert generate_command._DECODERS == decoder.MODES


def test_a_folders_own_template_is_honoured(capsys, tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "m"))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}"
    )
    flags = ("generate", "--model", str(folder), "-m", "2", "-p", "Who </s> are you?", "--show-prompt")
    shown = openelm(capsys, *flags)[2]
    assert "Q: Who </s> are you?\nA:" in shown
    assert "<|user|>" in openelm(capsys, *flags, "--ignore-chat-template", "--instruct")[2]
    assert "Q:" not in openelm(capsys, *flags, "--no-instruct")[2]
    assert "Say Who" in openelm(capsys, *flags, "--chat-template", "{{ bos_token }}Say {{ messages[0]['content'] }}")[2]
