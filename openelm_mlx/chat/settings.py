"""What `/set` can change during a chat: how tokens are drawn, how many, and what ends an answer."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..errors import GenerationError
from ..sampling import REPETITION_CONTEXT_SIZE, make_logits_processors, make_sampler

INSTRUCT_REPETITION_PENALTY = 1.2  # what Apple's model card recommends for the Instruct models
_OFF = ("off", "none")


@dataclass(frozen=True)
class ChatSettings:
    """The values, checked; `for_generation` is what `stream_generate` takes. A changed copy comes from `changed`."""

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = REPETITION_CONTEXT_SIZE
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    for_generation: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises GenerationError, naming the value that is out of range."""
        if self.max_tokens < 1:
            raise GenerationError(f"max_tokens must be 1 or more, got {self.max_tokens}")
        made = {
            "sampler": make_sampler(self.temp, self.top_p, self.min_p, self.top_k, self.seed),
            "logits_processors": make_logits_processors(self.repetition_penalty, self.repetition_context_size),
            "stop": self.stop,
        }
        object.__setattr__(self, "for_generation", made)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, *, instruct: bool) -> "ChatSettings":
        """From the command's flags, with Apple's repetition penalty for an Instruct model where none is given."""
        values = {name: getattr(args, name) for name in NAMES}
        if values["repetition_penalty"] is None and instruct:
            values["repetition_penalty"] = INSTRUCT_REPETITION_PENALTY
        return cls(**values, stop=tuple(args.stop))

    def changed(self, name: str, text: str) -> "ChatSettings":
        """A copy with one value read from text. Raises GenerationError for a name or value that there is not."""
        name = name.replace("-", "_")
        if name == "stop":
            return dataclasses.replace(self, stop=() if text in _OFF else (text,))
        if name not in NAMES:
            raise GenerationError(f"there is no setting {name!r}; these can be set: {', '.join((*NAMES, 'stop'))}")
        return dataclasses.replace(self, **{name: _value(name, text)})

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in NAMES} | {"stop": ", ".join(map(repr, self.stop)) or None}
        width = max(map(len, values))
        return "\n".join(f"{name:<{width}}  {'off' if value is None else value}" for name, value in values.items())


def _value(name: str, text: str) -> Any:
    if text in _OFF and name in _OPTIONAL:
        return None
    kind, number = ("a whole number", int) if name in _WHOLE else ("a number", float)
    try:
        return number(text)
    except ValueError:
        raise GenerationError(f"{name} must be {kind}, got {text!r}") from None


_WHOLE = ("top_k", "seed", "repetition_context_size", "max_tokens")
_OPTIONAL = ("seed", "repetition_penalty")
NAMES = ("temp", "top_p", "min_p", "top_k", "seed", "repetition_penalty", "repetition_context_size", "max_tokens")
