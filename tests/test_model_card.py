"""The model card: front matter that the Hub understands, and numbers that are the model's."""

import pytest
import yaml

from openelm_mlx import memory
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.hub import BUNDLED_MODEL
from openelm_mlx.model_card import model_card

BASE = "apple/OpenELM-270M-Instruct"
CONFIG = OpenELMConfig.from_name("270M")


def card(form="bf16", base_model=BASE, config=CONFIG):
    quantization = memory.form(config, form)
    return model_card(
        config,
        repo="me/OpenELM-270M-mlx",
        base_model=base_model,
        dtype="bfloat16",
        quantization=quantization,
        nbytes=memory.weight_bytes(config, quantization),
    )


def front_matter(text):
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def test_apples_models_are_named_as_the_base_with_their_licence():
    assert front_matter(card()) == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "openelm"],
        "base_model": BASE,
        "license": "other",
        "license_name": "apple-sample-code-license",
        "license_link": f"https://huggingface.co/{BASE}/blob/main/LICENSE",
    }
    assert f"[{BASE}](https://huggingface.co/{BASE}) in MLX format" in card()
    assert "The tokenizer is LLaMA's, under [Meta's licence]" in card()


@pytest.mark.parametrize("base_model", ["someone/OpenELM-270M-cats", None])
def test_of_other_models_no_licence_is_claimed(base_model):
    text = card(base_model=base_model)
    matter = front_matter(text)
    assert matter.get("base_model") == base_model
    assert not [key for key in matter if key.startswith("license")]
    assert "Apple" not in text
    assert f"the licence of {base_model or 'the checkpoint'}" in text


def test_the_tokenizer_of_another_vocabulary_is_not_llamas():
    assert "LLaMA" not in card(config=OpenELMConfig.from_file(BUNDLED_MODEL / "config.json"))


@pytest.mark.parametrize(
    ("form", "weights", "bits", "size"),
    [
        ("bf16", "bfloat16", "16.00", "543,054,336"),
        (
            "4-bit",
            "affine, 4 bits, groups of 64; embedding: affine, 8 bits, groups of 64; what is not quantized: bfloat16",
            "5.11",
            "173,277,696",
        ),
    ],
)
def test_the_numbers(form, weights, bits, size):
    rows = [line for line in card(form).splitlines() if line.startswith("| ")]
    assert rows == [
        "| | |",
        "| parameters | 271,527,168 |",
        "| layers, model dimension | 16, 1,280 |",
        "| context | 2,048 tokens |",
        f"| weights | {weights} |",
        f"| bits per weight | {bits} |",
        f"| size | {size} bytes |",
    ]


def test_how_to_use_it_names_the_repository():
    for command in ("openelm generate", "mlx_lm.generate"):
        assert f'{command} --model me/OpenELM-270M-mlx --prompt "' in card()
