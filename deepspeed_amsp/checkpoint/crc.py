"""CRC-32, by whoever computes it fastest here: the `isal` package (extra ``fast``) at memory speed, or zlib."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
