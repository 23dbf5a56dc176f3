"""The README.md of a converted model on the Hub: what it was made from, its numbers, how to use it, whose licence."""

from . import __version__
from .config import OpenELMConfig
from .hub import LLAMA_VOCAB_SIZE
from .quantize import Quantization

_EMBEDDING = "transformer.token_embeddings"


def model_card(
    config: OpenELMConfig,
    *,
    repo: str,
    base_model: str | None,
    dtype: str,
    quantization: Quantization | None,
    nbytes: int,
    measured: str | None = None,
    layout: str = "MLX",
) -> str:
    """README.md for a converted model. `base_model` is the Hub id it was made from, if it was; `nbytes` its weights.

    `layout`: MLX or Hugging Face. `measured`: how far it is from what it was made from, if that was measured.
    """
    origin = "An OpenELM" if base_model is None else f"[{base_model}](https://huggingface.co/{base_model})"
    parameters = config.num_parameters()
    return f"""{_front_matter(base_model, layout)}
# {repo}

{origin} in {layout} format, converted with openelm-mlx {__version__}.

| | |
|---|---|
| parameters | {parameters:,} |
| layers, model dimension | {config.num_transformer_layers}, {config.model_dim:,} |
| context | {config.max_context_length:,} tokens |
| weights | {_weights(dtype, quantization)} |
| bits per weight | {8 * nbytes / parameters:.2f} |
| size | {nbytes:,} bytes |
{"" if measured is None else f"| measured | {measured} |"}
## Use

With openelm-mlx:

```shell
openelm generate --model {repo} --prompt "Once upon a time"
```

With mlx-lm:

```shell
mlx_lm.generate --model {repo} --prompt "Once upon a time"
```

## Licence

{_licence(base_model, config)}
"""


def _front_matter(base_model: str | None, layout: str) -> str:
    library = "mlx" if layout == "MLX" else "transformers"
    lines = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", f"- {library}", "- openelm"]
    if base_model is not None:
        lines.append(f"base_model: {base_model}")
    if _is_apples(base_model):
        lines += ["license: other", "license_name: apple-sample-code-license", f"license_link: {_link(base_model)}"]
    return "\n".join(["---", *lines, "---", ""])


def _weights(dtype: str, quantization: Quantization | None) -> str:
    if quantization is None:
        return dtype
    embedding = quantization.modules.get(_EMBEDDING, dtype)
    return f"{quantization.default}; embedding: {embedding}; what is not quantized: {dtype}"


def _licence(base_model: str | None, config: OpenELMConfig) -> str:
    if _is_apples(base_model):
        text = f"The weights are Apple's, under its [sample code licence]({_link(base_model)})."
    else:
        text = f"The weights have the licence of {base_model or 'the checkpoint that they were converted from'}."
    if config.vocab_size == LLAMA_VOCAB_SIZE:
        text += " The tokenizer is LLaMA's, under [Meta's licence](https://ai.meta.com/llama/license)."
    return text


def _is_apples(base_model: str | None) -> bool:
    return base_model is not None and base_model.startswith("apple/OpenELM")


def _link(base_model: str | None) -> str:
    return f"https://huggingface.co/{base_model}/blob/main/LICENSE"
