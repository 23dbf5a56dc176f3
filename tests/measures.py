"""How far two models are apart."""

import numpy as np


def kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean KL divergence of the distributions behind two arrays of logits (L, V), in nats a token."""
    p, q = _log_softmax(reference), _log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
