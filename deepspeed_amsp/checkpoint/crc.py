"""CRC-32, at memory speed by isal, which has wheels for most machines, or by zlib."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
