"""A step of fine-tuning in PyTorch, written on its own from the formulas: what `openelm lora` must compute.

Run as a script, where PyTorch is, it writes `data/training_golden.npz`: of every case the loss, and of every gradient
and updated array two numbers, its length and its product with a fixed random array.
"""

from pathlib import Path
from typing import Any

import numpy as np
from reference import layer_widths, parameter_shapes, random_checkpoint, small_config

GOLDEN = Path(__file__).parent / "data" / "training_golden.npz"
CONFIG = small_config(num_transformer_layers=2, model_dim=64, head_dim=16, ffn_multipliers=[1.0, 2.0], vocab_size=96)
RANK, SCALE, Z_LOSS, CLIP = 4, 2.0, 1e-3, 1.0
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
LEARNING_RATE = 1e-2
CASES = [(kind, masked) for kind in ("lora", "dora", "full") for masked in (False, True)]
_EPS = 1e-6

Arrays = dict[str, np.ndarray]


def weights() -> Arrays:
    return random_checkpoint(CONFIG, seed=11)


def adapters(kind: str) -> Arrays:
    """The trained arrays of a case, by name; for "full" the layers' own and the final norm."""
    base = weights()
    if kind == "full":
        return {name: value for name, value in base.items() if "embeddings" not in name}
    rng = np.random.default_rng(5)
    arrays: Arrays = {}
    for name, shape in sorted(parameter_shapes(CONFIG).items()):
        if "proj" in name:
            path, (outputs, inputs) = name.removesuffix(".weight"), shape
            arrays[f"{path}.lora_a"] = (rng.standard_normal((inputs, RANK)) / np.sqrt(inputs)).astype(np.float32)
            arrays[f"{path}.lora_b"] = (0.1 * rng.standard_normal((RANK, outputs))).astype(np.float32)
            if kind == "dora":
                lengths = np.linalg.norm(base[name], axis=1)
                arrays[f"{path}.m"] = (lengths * (1 + 0.1 * rng.standard_normal(outputs))).astype(np.float32)
    return arrays


def rows(masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (2, 20), the second row padded after 13; and which of them are targets."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(3, CONFIG["vocab_size"], (2, 20)).astype(np.int32)
    counted = np.ones((2, 20), bool)
    counted[:, : 6 if masked else 1] = False
    counted[1, 13:] = False
    return tokens, counted


def torch_case(kind: str, masked: bool) -> tuple[float, Arrays, Arrays]:
    """(mean loss, its gradients, the trained arrays after two clipped updates of AdamW)."""
    import torch

    base = {name: torch.tensor(value) for name, value in weights().items()}
    own = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in adapters(kind).items()}
    tokens, counted = rows(masked)
    optimizer = torch.optim.AdamW(own.values(), lr=LEARNING_RATE, **ADAMW)
    first: Any = None
    for _ in range(2):
        optimizer.zero_grad()
        loss = _loss({**base, **own}, torch.tensor(tokens).long(), torch.tensor(counted), kind)
        loss.backward()
        if first is None:
            first = loss.item(), {name: value.grad.numpy().copy() for name, value in own.items()}
        torch.nn.utils.clip_grad_norm_(own.values(), CLIP)
        optimizer.step()
    return *first, {name: value.detach().numpy() for name, value in own.items()}


def _loss(p: Any, tokens: Any, counted: Any, kind: str) -> Any:
    import torch

    logits = _logits(p, tokens, kind)[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses = losses + Z_LOSS * torch.logsumexp(logits, -1).flatten() ** 2
    chosen = counted[:, 1:].flatten()
    return losses[chosen].sum() / chosen.sum()


def _logits(p: Any, tokens: Any, kind: str) -> Any:
    import torch

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + _EPS) * p[f"{name}.weight"]

    def linear(x: Any, path: str) -> Any:
        weight = p[f"{path}.weight"]
        if kind == "full":
            return x @ weight.T
        a, b = p[f"{path}.lora_a"], p[f"{path}.lora_b"]
        y = x @ weight.T + SCALE * (x @ a) @ b
        if kind == "dora":
            y = y * (p[f"{path}.m"] / (weight + SCALE * (a @ b).T).norm(dim=1).detach())
        return y

    size, length = CONFIG["head_dim"], tokens.shape[1]
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Any) -> Any:
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    embedding = p["transformer.token_embeddings.weight"]
    x = embedding[tokens]
    for i, (query, kv, _) in enumerate(layer_widths(CONFIG)):
        layer = f"transformer.layers.{i}"
        heads = linear(norm(x, f"{layer}.attn_norm"), f"{layer}.attn.qkv_proj")
        heads = heads.unflatten(-1, (-1, size)).transpose(1, 2)
        q, k, v = heads.split([query, kv, kv], 1)
        q, k = rotate(norm(q, f"{layer}.attn.q_norm")), rotate(norm(k, f"{layer}.attn.k_norm"))
        k, v = (each.repeat_interleave(query // kv, 1) for each in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{layer}.attn.out_proj")
        gate, up = linear(norm(x, f"{layer}.ffn_norm"), f"{layer}.ffn.proj_1").chunk(2, -1)
        x = x + linear(torch.nn.functional.silu(gate) * up, f"{layer}.ffn.proj_2")
    return norm(x, "transformer.norm") @ embedding.T


def digest(arrays: Arrays) -> np.ndarray:
    """(length, product with a random array of that shape) of each array, by name: (number of arrays, 2)."""
    rng = np.random.default_rng(13)
    return np.array(
        [
            (np.linalg.norm(value), float((value * rng.standard_normal(value.shape)).sum()))
            for _, value in sorted(arrays.items())
        ]
    )


def write_golden() -> None:
    golden: Arrays = {}
    for kind, masked in CASES:
        loss, gradients, updated = torch_case(kind, masked)
        key = f"{kind}_{'masked' if masked else 'whole'}"
        golden |= {f"{key}_loss": np.array(loss), f"{key}_gradients": digest(gradients)}
        golden[f"{key}_updated"] = digest(updated)
    np.savez_compressed(GOLDEN, **golden)


if __name__ == "__main__":
    write_golden()
