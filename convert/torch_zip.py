"""The records of a zip archive that torch.save wrote: uncompressed, and each found where the directory says it is.

`zipfile` reads the directory; what it takes on trust is checked here, because tensors are read straight from the file
by position. Nothing is ever unpacked.
"""

import errno
import struct
import zipfile
from typing import BinaryIO, NamedTuple

from ..errors import CheckpointError
from .torch_tensor import SourceFile

_MAX_DIRECTORY_BYTES = 8 * 2**20  # OpenELM-3B's training checkpoint needs 0.1 MB
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENCRYPTED, _SIZES_FOLLOW, _UTF8_NAME = 0x1, 0x8, 0x800  # bits of a record's flags
_SIZE_ELSEWHERE = 0xFFFFFFFF  # zip64: the real size stands in an extra field


class Record(NamedTuple):
    """Where the bytes of a record lie in the file."""

    position: int
    size: int


def read_directory(file: SourceFile) -> dict[str, Record]:
    """Every record by name. Raises CheckpointError when the archive is cut short, or is not what torch.save writes."""
    try:
        with file.path.open("rb") as stream, zipfile.ZipFile(_SmallReads(stream, file)) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise file.error("is a TorchScript program, which is not read: torch.save the model's state_dict()")
            records = [_locate(info, stream, file) for info in archive.infolist()]
            end_of_records = archive.start_dir
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
        # EINVAL: the directory sent us to a negative position
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise CheckpointError(f"cannot read {file.path}: {error.strerror or error}") from None
        raise file.error(
            f"is cut short or damaged ({file.size} bytes, no valid zip directory): download it again"
        ) from None
    _check_apart(records, end_of_records, file)
    by_name = {name: record for name, _, record in records}
    if len(by_name) != len(records):
        raise file.error("is refused: two of its records have the same name")
    return by_name


class _SmallReads:
    """A file as `zipfile` needs it, that refuses to read a directory of hundreds of megabytes in one piece."""

    def __init__(self, stream: BinaryIO, file: SourceFile):
        self.stream, self.file = stream, file
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, count: int = -1) -> bytes:
        if count < 0:
            count = max(self.file.size - self.stream.tell(), 0)
        if count > _MAX_DIRECTORY_BYTES:
            raise self.file.error(f"is refused: its zip directory is larger than {_MAX_DIRECTORY_BYTES >> 20} MB")
        return self.stream.read(count)


def _locate(info: zipfile.ZipInfo, stream: BinaryIO, file: SourceFile) -> tuple[str, int, Record]:
    """A record's name, where its header begins, and where its bytes are; its two headers must tell the same story."""
    name = info.filename
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise file.error(f"is refused: a record is named {name[:60]!r}")
    stream.seek(info.header_offset)
    header = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    signature, _, flags, method, _, _, _, packed, size, name_length, extra_length = header
    local_name = stream.read(name_length).decode("utf-8" if flags & _UTF8_NAME else "cp437")
    if (flags | info.flag_bits) & _ENCRYPTED:
        raise file.error(f"is refused: its record {name[:60]!r} is encrypted")
    if method != zipfile.ZIP_STORED or info.compress_type != zipfile.ZIP_STORED:
        raise file.error(
            f"is refused: its record {name[:60]!r} is compressed, which torch.save never does: get the original file"
        )
    later = [0] if flags & _SIZES_FOLLOW else []
    known_sizes = (info.file_size, _SIZE_ELSEWHERE, *later)
    if (
        signature != b"PK\x03\x04"
        or local_name != info.orig_filename
        or info.compress_size != info.file_size
        or packed not in known_sizes
        or size not in known_sizes
    ):
        raise file.error(f"is damaged: its record {name[:60]!r} is described twice, and differently")
    data = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return name, info.header_offset, Record(data, info.file_size)


def _check_apart(records: list[tuple[str, int, Record]], end: int, file: SourceFile) -> None:
    """Records follow each other without sharing a byte, and all end before the directory."""

    bounds = [(header, record.position + record.size) for _, header, record in records]
    free = 0
    for start, stop in [*sorted(bounds), (end, end)]:
        if start < free:
            raise file.error("is damaged: its records overlap or reach beyond the end")
        free = stop
