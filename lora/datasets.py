"""Training, validation and test sequences from what the user named, with one summary of what became of the rows."""

import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ..chat.format import ChatFormat
from ..errors import DataError
from ..tokenizer import Tokenizer
from .data_settings import DEFAULT_VAL_SPLIT, DataSettings
from .data_sources import Source, find_sources
from .data_summary import account, overlap
from .formats import Columns, Example, FormatName, detect, interpret, nothing_to_learn
from .long_rows import Fitting
from .progress import counting
from .rows import Row
from .sequences import Encoder, Sequence

Notify = Callable[[str], None]
_TICK = 200  # rows between two steps of the progress bar


@dataclass(frozen=True)
class Datasets:
    """Sequences ready to be batched; splits not asked for are empty. `summary` is what was told, line by line."""

    train: list[Sequence]
    valid: list[Sequence]
    test: list[Sequence]
    summary: tuple[str, ...]


@dataclass
class _Split:
    """The examples of a split, each with its row's name, and what was left out."""

    name: str
    examples: list[tuple[Example, str]]
    formats: Counter[str]
    left_out: list[str]  # "train.jsonl:4 has an empty completion: {...}"


def load_datasets(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    splits: Collection[str] = ("train", "valid"),
    max_context: int | None = None,
    chat_format: ChatFormat | None = None,
    notify: Notify | None = None,
) -> Datasets:
    """Read and encode the splits asked for. Validation is optional, the others are not.

    max_context: the model's, to which a larger `max_seq_length` is lowered, saying so.
    chat_format: how `openelm chat` would talk to this model, where a folder has a template of its own.
    notify: gets each line of the summary, stderr without. Raises DataError, HubError or ConfigError.
    """
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        (notify or _to_stderr)(line)

    if max_context is not None and settings.max_seq_length > max_context:
        tell(f"sequences are limited to the model's context of {max_context} tokens")
        settings = replace(settings, max_seq_length=max_context)
    encoder = Encoder(tokenizer, mask_prompt=settings.mask_prompt, text_eos=settings.text_eos, chat_format=chat_format)
    read = _read_splits(settings, splits, tell)
    if settings.mask_prompt:
        tell("prompts are masked: only answers count")
    if chat_format is None and not tokenizer.is_instruct and any(split.formats["chat"] for split in read.values()):
        tell("chat rows are written in OpenELM-Instruct's form: chat with this base model needs --instruct")
    encoded = {name: _encoded(split, encoder, settings, tell) for name, split in read.items()}
    for name in ("valid", "test"):
        warning = overlap(encoded.get("train", ()), encoded.get(name, ()))
        if warning:
            tell(f"{name}: {warning}")
    made = {name: encoded.get(name, []) for name in ("train", "valid", "test")}
    return Datasets(made["train"], made["valid"], made["test"], tuple(lines))


def _to_stderr(line: str) -> None:
    print(f"openelm: {line}", file=sys.stderr)


def _read_splits(settings: DataSettings, splits: Collection[str], tell: Notify) -> dict[str, _Split]:
    """Every split's examples, validation divided from training where that is asked for."""
    sources = find_sources(settings, splits)
    read = {name: _read(name, found, settings) for name, found in sources.splits.items()}
    for name in splits:
        if name != "valid" and not (name in read and read[name].examples):
            raise _nothing(name, read.get(name))
    if "valid" in splits and "valid" not in read:
        share = settings.val_split
        if share is None:
            share = DEFAULT_VAL_SPLIT if sources.single else 0.0
        read["train"], read["valid"] = _divided(read["train"], share, settings.seed)
    if "valid" in splits and not read["valid"].examples:
        tell("no validation: there are no rows for it (valid.jsonl, or --val-split 0.1)")
    return {name: read[name] for name in splits}


def _nothing(name: str, split: _Split | None) -> DataError:
    if split is None:
        return DataError(f"there is no {name} data: expected a file {name}.jsonl, or a split {name}")
    if split.left_out:
        return DataError(f"no row of {name} has anything to learn: {split.left_out[0]}")
    return DataError(f"the {name} data has no rows")


def _read(name: str, sources: list[Source], settings: DataSettings) -> _Split:
    split = _Split(name, [], Counter(), [])
    for source in sources:
        with closing(source.rows) as rows:
            form = None
            for row in islice(rows, settings.max_rows):
                form = form or detect(row, source.columns)
                _add(split, row, form, source.columns, mask_prompt=settings.mask_prompt)
    return split


def _add(split: _Split, row: Row, form: FormatName, columns: Columns, *, mask_prompt: bool) -> None:
    if form == "text" and mask_prompt:
        raise DataError(f"{row.where}: a text row has no prompt to mask: leave out --mask-prompt")
    example = interpret(row, form, columns)
    split.formats[form] += 1
    reason = nothing_to_learn(example)
    if reason:
        split.left_out.append(f"{row.where} has {reason}: {row.excerpt}")
    else:
        split.examples.append((example, row.where))


def _divided(train: _Split, share: float, seed: int) -> tuple[_Split, _Split]:
    """Training without the held-out rows, and these: at least one where a share is asked for, and never all."""
    count = len(train.examples)
    held = min(max(1, round(count * share)), count - 1) if share else 0
    draws = np.random.PCG64(np.random.SeedSequence([seed, 1])).random_raw(count)
    chosen = set(np.argsort(draws, kind="stable")[:held].tolist())
    kept = [example for i, example in enumerate(train.examples) if i not in chosen]
    valid = [train.examples[i] for i in sorted(chosen)]
    return replace(train, examples=kept), _Split("valid", valid, Counter(train.formats), [])


def _encoded(split: _Split, encoder: Encoder, settings: DataSettings, tell: Notify) -> list[Sequence]:
    """The split's sequences, no longer than the limit; tells what became of the rows."""
    fitting = Fitting(settings.max_seq_length, settings.long_rows)
    sequences: list[Sequence] = []
    with counting(f"tokenizing {split.name}", len(split.examples)) as tick:
        for i, (example, where) in enumerate(split.examples, 1):
            sequences += fitting.fit(encoder.encode(example, where))
            if i % _TICK == 0:
                tick(_TICK)
    if split.examples and not sequences:
        raise DataError(
            f"no row of {split.name} has anything to learn within {settings.max_seq_length} tokens: raise "
            "--max-seq-length, or try --long-rows split"
        )
    for line in account(len(split.examples), split.formats, split.left_out, fitting, sequences):
        tell(f"{split.name}: {line}")
    return sequences
