"""Compressed files, by the ending of their name: .gz, .bz2, .xz and .zst.

A file may consist of several members, one after the other.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import PurePath
from typing import Any, BinaryIO, cast

from fastgen.corpus.models import need

ENDINGS = (".gz", ".bz2", ".xz", ".zst")
TORN = (EOFError, zlib.error, lzma.LZMAError)
"""What reading a truncated or damaged compressed file raises, besides OSError."""

_PIECE = 1 << 16


def split(name: PurePath) -> tuple[str, str]:
    """Return the ending of a file's format and that of its compression; empty if there is none."""
    if name.suffix not in ENDINGS:
        return name.suffix, ""
    return PurePath(name.stem).suffix, name.suffix


def unpacked(stream: BinaryIO, ending: str) -> BinaryIO:
    """Return the decompressed contents of a stream.

    Raises:
        CommandError: a library for it is missing.
    """
    if ending == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if ending == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(stream))
    if ending == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(stream))
    if ending == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstandard(stream)))
    return stream


def packed(data: bytes, ending: str) -> bytes:
    """Return a complete member that holds the data. Equal data gives equal bytes."""
    if ending == ".gz":
        return gzip.compress(data, mtime=0)
    if ending == ".bz2":
        return bz2.compress(data)
    if ending == ".xz":
        return lzma.compress(data)
    if ending == ".zst":
        need("zstandard")
        import zstandard

        return zstandard.ZstdCompressor().compress(data)
    return data


class _Zstandard(io.RawIOBase):
    """Reader of consecutive frames. Unlike zstandard's own reader it detects a truncated frame."""

    def __init__(self, stream: BinaryIO) -> None:
        need("zstandard")
        import zstandard

        self._stream, self._new = stream, zstandard.ZstdDecompressor().decompressobj
        self._error: type[Exception] = zstandard.ZstdError
        self._frame: Any = None
        self._waiting, self._made = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            piece = self._waiting or self._stream.read(_PIECE)
            if not piece:
                if self._frame is not None:
                    raise EOFError("the last frame is not whole")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._made = memoryview(self._frame.decompress(piece))
            except self._error as error:
                raise OSError(str(error)) from error
            self._waiting = b""
            if self._frame.eof:
                self._waiting, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._made))
        buffer[:count] = self._made[:count]
        self._made = self._made[count:]
        return count
