"""The work of a conversion: one source streamed into one or more folders, each verified before any has its name."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol, Self

import numpy as np

from ..atomic import check_space, new_folders
from ..config import OpenELMConfig
from ..model_card import model_card
from ..quantize import Quantization
from ..safetensors_writer import PlannedTensor, SafetensorsWriter
from ..tensors import CODES, StoredTensor
from .measure import Measurement, fixed_prompt, measure, source_logits
from .needs import OTHER_FILES_BYTES
from .output import copy_extras, write_config, write_tokenizer
from .progress import progress
from .sources import Source
from .split_folder import AdapterFolder
from .streaming import copied, outputs, transformed
from .verify import check_copy, check_folder, check_forward


class Writer(Protocol):
    """Puts tensors into a folder, in their order; all are written when `start_sync` is called."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def append(self, name: str, rows: np.ndarray) -> None: ...

    def start_sync(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One folder to be made of a source. `upload_repo`: the repository that its model card is written for, if any."""

    target: Path
    source: Source
    tokenizer: Path
    instruct: bool
    dtype: str
    quantization: Quantization | None
    outputs: dict[str, list[PlannedTensor]]  # source tensor -> what is written for it
    base_model: str | None = None  # the Hub id of the source
    upload_repo: str | None = None
    layout: ClassVar[str] = "MLX"  # whose folder it is, as the model card says it

    @classmethod
    def of(
        cls,
        target: Path,
        source: Source,
        tokenizer: Path,
        *,
        instruct: bool,
        dtype: str,
        quantization: Quantization | None,
        base_model: str | None = None,
        upload_repo: str | None = None,
    ) -> Self:
        if source.quantization is None:
            in_order = {name: source.tensors[name] for name in source.config.parameter_shapes()}
            planned = outputs(in_order, dtype, quantization)
        else:  # packed weights stay as they are
            assert quantization == source.quantization
            planned = {name: [PlannedTensor(name, one.dtype, one.shape)] for name, one in source.tensors.items()}
        return cls(target, source, tokenizer, instruct, dtype, quantization, planned, base_model, upload_repo)

    @property
    def config(self) -> OpenELMConfig:
        return self.source.config

    @property
    def plan(self) -> list[PlannedTensor]:
        return [tensor for group in self.outputs.values() for tensor in group]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.plan)

    @property
    def is_copy(self) -> bool:
        """Whether no value changes."""
        if self.source.quantization is not None:
            return not self.source.is_computed
        dtypes = {tensor.dtype for tensor in self.source.tensors.values()}
        return not self.source.is_computed and self.quantization is None and dtypes == {CODES[self.dtype]}

    def writer(self, folder: Path) -> Writer:
        """What puts the weights into the folder."""
        return SafetensorsWriter(folder, self.plan)

    def write_others(self, folder: Path) -> None:
        """Everything but the weights."""
        write_config(folder, self.config, self.dtype, self.quantization)
        context = self.config.max_context_length
        write_tokenizer(folder, self.tokenizer, self.source.folder, instruct=self.instruct, max_length=context)
        copy_extras(folder, self.source.path, self.config)

    def verify(self, folder: Path) -> dict[str, StoredTensor]:
        """The tensors as they are on disk. Raises RunFailedError when they are not what was meant."""
        written = check_folder(folder, self.plan, self.config, self.quantization)
        with progress("verifying", self.nbytes) as tick:
            if self.is_copy:
                check_copy(self.source.tensors, written, tick)
            else:
                check_forward(written, self.config, self.quantization, self.dtype, tick)
        return written

    def write_card(self, folder: Path, measured: Measurement | None) -> None:
        """The model card in the place of the source's, so that the folder is what is uploaded."""
        if self.upload_repo is None:
            return
        card = model_card(
            self.config,
            repo=self.upload_repo,
            base_model=self.base_model,
            dtype=self.dtype,
            quantization=self.quantization,
            nbytes=self.nbytes,
            measured=None if measured is None else str(measured),
            layout=self.layout,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")


def run(
    jobs: Sequence[Job],
    *,
    force: bool,
    measured: bool = False,
    reference: Source | None = None,
    beside: Sequence[AdapterFolder] = (),
) -> list[Measurement | None]:
    """Write every job's folder from one read of their source (and dtype); return how far each moved, if asked.

    reference: what they moved from, where that is not the jobs' own source. beside: further folders, made with them.
    Folders get their names last, when all are verified. Raises OpenELMError; every target then is as it was.
    """
    check_space(jobs[0].target, sum(job.nbytes + OTHER_FILES_BYTES for job in jobs))
    jobs[0].source.tell()
    with ExitStack() as stack:
        targets = [*(adapter.target for adapter in beside), *(job.target for job in jobs)]
        folders = stack.enter_context(new_folders(targets, force=force))
        for adapter in beside:
            adapter.write(folders.pop(0))
        writers = [stack.enter_context(job.writer(folder)) for job, folder in zip(jobs, folders, strict=True)]
        _write(jobs, writers)
        for job, folder in zip(jobs, folders, strict=True):
            job.write_others(folder)  # while the disk works
        written = [job.verify(folder) for job, folder in zip(jobs, folders, strict=True)]
        distances: list[Measurement | None] = [None for _ in jobs]
        if measured:
            distances = _distances(reference or jobs[0].source, jobs, written)
        for job, folder, distance in zip(jobs, folders, distances, strict=True):
            job.write_card(folder, distance)
    return distances


def _write(jobs: Sequence[Job], writers: Sequence[Writer]) -> None:
    first = jobs[0]
    tensors = {name: first.source.tensors[name] for name in first.outputs}
    quantizations = [job.quantization for job in jobs]
    with progress("writing", sum(job.nbytes for job in jobs)) as tick:
        if first.source.quantization is None:
            stream = transformed(tensors, first.dtype, quantizations)
        else:
            stream = ((name, [rows for _ in jobs]) for name, rows in copied(tensors))
        for name, blocks in stream:
            for job, writer, block in zip(jobs, writers, blocks, strict=True):
                for planned, rows in zip(job.outputs[name], block, strict=True):
                    writer.append(planned.name, rows)
                tick(sum(rows.nbytes for rows in block))
    for writer in writers:
        writer.start_sync()


def _distances(
    reference: Source, jobs: Sequence[Job], written: Sequence[dict[str, StoredTensor]]
) -> list[Measurement | None]:
    tokens = fixed_prompt(jobs[0].tokenizer, reference.config)
    with progress("measuring", reference.nbytes + sum(job.nbytes for job in jobs)) as tick:
        expected = source_logits(reference.tensors, reference.config, tokens, tick)
        return [
            measure(expected, tensors, job.config, job.quantization, job.dtype, tokens, tick)
            for job, tensors in zip(jobs, written, strict=True)
        ]
