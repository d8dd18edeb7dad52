"""ELF files with made-up device code in nvcc's layout, for tests of bundles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PTX, CUBIN = 1, 2
EXACT, FAMILY, ZSTANDARD, LINUX_64 = 0x100000, 0x200000, 0x8000, 0x11
BETWEEN_CONTAINERS = bytes(24)


@dataclass(frozen=True)
class Code:
    """Device code: an entry of a container.

    Attributes:
        kind: 1 for PTX, 2 for a cubin.
        sm: 90 for sm_90.
        flags: of the entry.
        payload: as it lies in the file, before it is padded.
        header_size: nvcc writes 64, more with options or attributes.
    """

    kind: int
    sm: int
    flags: int = ZSTANDARD | LINUX_64
    payload: bytes = b"code"
    header_size: int = 64

    def to_bytes(self) -> bytes:
        """Returns header, payload and padding."""
        padded = self.payload + bytes(-len(self.payload) % 8)
        header = (
            self.kind.to_bytes(2, "little")
            + (0x101).to_bytes(2, "little")
            + self.header_size.to_bytes(4, "little")
            + len(padded).to_bytes(8, "little")
            + len(self.payload).to_bytes(4, "little")
            + bytes(8)
            + self.sm.to_bytes(4, "little")
            + bytes(8)
            + self.flags.to_bytes(8, "little")
            + bytes(8)
            + (3 * len(self.payload)).to_bytes(8, "little")
        )
        return header + b"\xaa" * (self.header_size - len(header)) + padded


def container(entries: bytes) -> bytes:
    """Returns a container with these entries."""
    return (
        (0xBA55ED50).to_bytes(4, "little")
        + (1).to_bytes(2, "little")
        + (16).to_bytes(2, "little")
        + len(entries).to_bytes(8, "little")
        + entries
    )


def containers(codes: Sequence[Sequence[Code]]) -> bytes:
    """Returns a section of device code."""
    return b"".join(
        container(b"".join(code.to_bytes() for code in entries)) + BETWEEN_CONTAINERS
        for entries in codes
    )


def library(device_code: bytes, host_code: bytes = b"host code here", tail: bytes = b"") -> bytes:
    """Returns a 64-bit ELF file with a section .nv_fatbin between two others.

    Args:
        device_code: contents of the section.
        host_code: contents of the section before it.
        tail: contents of the section behind it.
    """
    sections = [(b".text", 1, host_code), (b".nv_fatbin", 1, device_code), (b".data", 1, tail)]
    names = b"\0" + b"".join(name + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    sections.append((b".shstrtab", 3, names))
    body, table = b"", bytes(64)
    for name, kind, contents in sections:
        body += bytes(-len(body) % 16)
        table += (
            (names.index(b"\0" + name + b"\0") + 1).to_bytes(4, "little")
            + kind.to_bytes(4, "little")
            + bytes(16)
            + (64 + len(body)).to_bytes(8, "little")
            + len(contents).to_bytes(8, "little")
            + bytes(8)
            + (8).to_bytes(8, "little")
            + bytes(8)
        )
        body += contents
    body += bytes(-len(body) % 16)
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + (3).to_bytes(2, "little")  # a shared object
        + (62).to_bytes(2, "little")  # x86-64
        + (1).to_bytes(4, "little")
        + bytes(16)
        + (64 + len(body)).to_bytes(8, "little")
        + bytes(4)
        + (64).to_bytes(2, "little")
        + bytes(4)
        + (64).to_bytes(2, "little")
        + (len(sections) + 1).to_bytes(2, "little")
        + len(sections).to_bytes(2, "little")
    )
    return header + body + table
