"""How a generation is printed: text as it comes, one JSON object, or a JSON line for every token."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from .config_keys import counted

if TYPE_CHECKING:
    from .drafts import Acceptance
    from .generation import GenerationResponse
    from .logprobs import LogprobRecorder, TokenLogprob
    from .tokenizer import Tokenizer


def printer(args: argparse.Namespace, tokenizer: "Tokenizer", recorder: "LogprobRecorder | None") -> "TextPrinter":
    """The printer that the flags ask for."""
    if args.json or args.jsonl:
        return JsonPrinter(args.model, tokenizer, recorder, lines=args.jsonl)
    return TextPrinter()


class TextPrinter:
    """The text on stdout, and what there is to say about it on stderr."""

    def __init__(self) -> None:
        self.last: GenerationResponse | None = None

    def token(self, response: "GenerationResponse") -> None:
        """Print one token's text."""
        self.last = response
        print(response.text, end="", flush=True)

    def end(self, acceptance: "Acceptance | None") -> None:
        """Print the statistics."""
        print()
        if self.last is not None:
            print(statistics(self.last, acceptance), file=sys.stderr)


class JsonPrinter(TextPrinter):
    """One object with the whole; before it, with `lines`, one object for each token."""

    def __init__(self, model: str, tokenizer: "Tokenizer", recorder: "LogprobRecorder | None", *, lines: bool) -> None:
        super().__init__()
        self.model, self.tokenizer, self.recorder, self.lines = model, tokenizer, recorder, lines
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []

    def token(self, response: "GenerationResponse") -> None:
        self.last = response
        self.texts.append(response.text)
        self.tokens.append(response.token)
        line: dict[str, Any] = {"token": response.token, "text": response.text}
        if self.recorder is not None:
            record = logprob_record(self.recorder.of(response.token))
            self.logprobs.append(record)
            line |= {"logprob": record["logprob"], "top": record["top"]}
        if self.lines:
            print(json.dumps(line), flush=True)

    def end(self, acceptance: "Acceptance | None") -> None:
        assert self.last is not None, "a generation makes at least one token"
        last = self.last
        record: dict[str, Any] = {
            "text": "".join(self.texts),
            "tokens": self.tokens,
            "finish_reason": last.finish_reason,
            "prompt_tokens": last.prompt_tokens,
            "generation_tokens": last.generation_tokens,
            "prompt_tps": last.prompt_tps,
            "generation_tps": last.generation_tps,
            "ttft_s": last.ttft_s,
            "peak_memory_bytes": last.peak_memory_bytes,
            "model": self.model,
        }
        if self.recorder is not None:
            record["logprobs"] = self.logprobs
        if acceptance is not None:
            record["drafts"] = {"proposed": acceptance.proposed, "accepted": acceptance.accepted}
        print(json.dumps(record))


def logprob_record(logprob: "TokenLogprob") -> dict[str, Any]:
    """A token's log-probability and its alternatives, as JSON holds them."""
    return {"token": logprob.token, "logprob": logprob.logprob, "top": [list(pair) for pair in logprob.top]}


def statistics(last: "GenerationResponse", acceptance: "Acceptance | None" = None) -> str:
    """What a generation took, for people."""
    lines = [
        f"prompt      {counted(last.prompt_tokens, 'token')}, {last.prompt_tps:.1f} tokens/s, "
        f"first token after {last.ttft_s:.3f} s",
        f"generation  {counted(last.generation_tokens, 'token')}, {last.generation_tps:.1f} tokens/s",
        f"peak memory {last.peak_memory_bytes / 1e6:.0f} MB (MLX allocator)",
    ]
    if acceptance is not None:
        lines.append(f"drafts      {acceptance.accepted} of {acceptance.proposed} accepted")
    if last.finish_reason == "length":
        lines.append(f"stopped at {counted(last.generation_tokens, 'token')}; --max-tokens N asks for more")
    return "\n".join(lines)
