"""The kinds of file that Apple released with OpenELM, made from any weights, and what each is to compute.

`weights` are float32 under Hub names. A LoRA or DoRA state has CoreNet's names and padded vocabulary; `merged` is the
plain formula of what it computes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Weights = dict[str, np.ndarray]
LINEARS = ("attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2")
PADDING = 128


def corenet_state(weights: Weights) -> Weights:
    """CoreNet's names, the vocabulary padded with rows that nothing may use."""
    state = {name.removeprefix("transformer."): value for name, value in weights.items()}
    embedding = state["token_embeddings.weight"]
    padding = np.full((PADDING, embedding.shape[1]), 9, np.float32)
    return state | {"token_embeddings.weight": np.concatenate([embedding, padding])}


def training_checkpoint(state: Weights, ema: Weights | None = None) -> dict[str, Any]:
    """What CoreNet's trainer saves."""
    moments = {i: {"step": np.float32(7), "exp_avg": v, "exp_avg_sq": v + 1} for i, v in enumerate(state.values())}
    moments = {i: {**one, "step": np.array(7, np.float32)} for i, one in moments.items()}
    checkpoint = {
        "iterations": 7,
        "epoch": 0,
        "model_state_dict": state,
        "optim_state_dict": {"state": moments, "param_groups": [{"lr": 0.001, "betas": (0.9, 0.95)}]},
        "best_metric": 0.5,
        "is_interval_ckpt": True,
        "gradient_scaler_state_dict": {},
    }
    return checkpoint | ({} if ema is None else {"ema_state_dict": ema})


def adapter_state(weights: Weights, *, rank: int, dora: bool = False, embedding: bool = True, seed: int = 0) -> Weights:
    """The whole model with random adapters on every linear layer, as `peft/openelm_{lora,dora}_SIZE.pt` are."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)

    state: Weights = {}
    for name, value in corenet_state(weights).items():
        module = name.removesuffix(".weight")
        if module == "token_embeddings" and embedding:
            rows, columns = value.shape
            state |= {
                f"{module}.base_layer.weight": value,
                f"{module}.lora_embedding_A.lora": normal(rank, rows),
                f"{module}.lora_embedding_B.lora": normal(columns, rank),
            }
        elif module.endswith(LINEARS):
            rows, columns = value.shape
            state |= {
                f"{module}.base_layer.weight": value,
                f"{module}.lora_A.lora.weight": normal(rank, columns),
                f"{module}.lora_B.lora.weight": normal(rows, rank),
            }
            if dora:
                lengths = np.linalg.norm(value, axis=1) * (1 + normal(rows))
                state[f"{module}.lora_magnitude_vector.lora"] = lengths.astype(np.float32)
        else:
            state[name] = value
    return state


def merged(state: Weights, scale: float, vocab_size: int, *, tie: bool = False) -> Weights:
    """Plain float64 weights that compute what an adapter state computes; an embedding adapter unties them."""
    plain: Weights = {}
    for name, value in state.items():
        module, _, rest = name.partition(".base_layer.")
        if not rest and "lora_" not in name:
            plain[name] = value.astype(np.float64)
        elif rest and module == "token_embeddings":
            a, b = (state[f"{module}.lora_embedding_{side}.lora"].astype(np.float64) for side in "AB")
            plain[f"{module}.weight"] = value if tie else value + scale * (b @ a).T
            if not tie:
                plain["lm_head.weight"] = value.astype(np.float64)
        elif rest:
            a, b = (state[f"{module}.lora_{side}.lora.weight"].astype(np.float64) for side in "AB")
            total = value + scale * b @ a
            lengths = state.get(f"{module}.lora_magnitude_vector.lora")
            if lengths is not None:
                total *= (lengths / np.linalg.norm(total, axis=1))[:, None]
            plain[f"{module}.weight"] = total
    for name in ("token_embeddings.weight", "lm_head.weight"):
        if name in plain:
            plain[name] = plain[name][:vocab_size]
    return {name if name == "lm_head.weight" else f"transformer.{name}": value for name, value in plain.items()}


def packed_4bit(matrix: np.ndarray, group: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(words, scales, biases) by hand: element j of a word at bit 4 j, w = q * scale + bias."""
    groups = matrix.reshape(len(matrix), -1, group)
    biases = groups.min(-1).astype(np.float16)
    scales = ((groups.max(-1) - biases) / 15).astype(np.float16)
    steps = np.round((groups - biases[..., None]) / scales[..., None].astype(np.float32)).clip(0, 15).astype(np.uint32)
    nibbles = steps.reshape(len(matrix), -1, 8)
    words = sum(nibbles[..., j] << np.uint32(4 * j) for j in range(8))
    return words.astype(np.uint32), scales, biases


def unpacked_4bit(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, group: int = 64) -> np.ndarray:
    """The float32 matrix that such words mean."""
    steps = np.stack([(words >> np.uint32(4 * j)) & 15 for j in range(8)], axis=-1).reshape(len(words), -1)
    wide = [np.repeat(part.astype(np.float32), group, axis=1) for part in (scales, biases)]
    return steps * wide[0] + wide[1]


def apple_mlx(folder: Path, weights: Weights, *, packed: bool = False, name: str = "OpenELM-small") -> Weights:
    """Apple's MLX folder, in float16 or with 4-bit linear layers as MLX 0.10 wrote them. Returns what it holds."""
    folder.mkdir(parents=True)
    tensors: Weights = {}
    meant: Weights = {}
    for key, value in corenet_state(weights).items():
        module = key.removesuffix(".weight")
        if packed and module.endswith(LINEARS):
            parts = packed_4bit(value)
            tensors |= {f"{module}.{suffix}": part for suffix, part in zip(_SUFFIXES, parts, strict=True)}
            meant[key] = unpacked_4bit(*parts)
        else:
            tensors[key] = value.astype(np.float16)
            meant[key] = tensors[key].astype(np.float32)
    save_file(tensors, folder / "weights.safetensors")
    rows = len(meant["token_embeddings.weight"])
    config: dict[str, Any] = {"model_name": name, "vocab_size": rows, "max_context_length": 128}
    if packed:
        config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    meant["token_embeddings.weight"] = meant["token_embeddings.weight"][:-PADDING]
    return {f"transformer.{key}": value for key, value in meant.items()}


def lora_yaml(path: Path, *, rank: int, alpha: float, rslora: bool = False, name: str = "OpenELM-small") -> Path:
    """The part of a training configuration that tells an adapter's factor."""
    params = (
        f"{{adapter_name: lora, r: {rank}, lora_alpha: {alpha}, lora_dropout: 0.1, use_rslora: {str(rslora).lower()}}}"
    )
    path.write_text(
        f"model:\n  language_modeling:\n    general_gpt: {{model_name: {name}, vocab_size: 4224, "
        "max_context_length: 128}\n  lora:\n    use_lora: true\n    config:\n"
        + "".join(f"      - {{regex: '{regex}', params: {params}}}\n" for regex in (".*embed.*", ".*proj.*"))
    )
    return path


_SUFFIXES = ("weight", "scales", "biases")
