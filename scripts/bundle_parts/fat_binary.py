"""Removes from a CUDA library the code that one GPU architecture cannot use.

nvcc puts device code for several architectures into the ELF section `.nv_fatbin`: containers, each
aligned to 8 bytes, one per translation unit. A container is a header and its entries back to back:

    container  0  u32 magic 0xBA55ED50   4  u16 version      6  u16 size of this header (16)
               8  u64 size of all entries
    entry      0  u16 kind (1 PTX, 2 cubin)                  4  u32 size of this header (64 or more)
               8  u64 payload size, padded to 8             16  u32 size if compressed
              28  u32 architecture, 90 for sm_90            40  u64 flags
              56  u64 size before compression, or 0

Flags: 0x100000 marks sm_90a ("a": exactly this GPU), 0x200000 marks sm_100f ("f": its family);
0x2000 and 0x8000 mark payloads compressed by LZ4 and Zstandard. NVIDIA documents none of this. It
was read from vLLM 0.32.0's libraries, and agrees with what NVIDIA's cuobjdump lists of them.

`keep_architecture` moves a container's usable entries to its front, whole, lowers the container's
size to theirs and overwrites the rest with zeros, which compress to nothing. Nothing outside
containers moves, and containers stay where they begin:

    before   | size 5 | sm_75 | sm_80 | sm_90a | sm_90 | sm_100 |  next container ...
    after    | size 2 | sm_90a | sm_90 |  0 0 0 0 0 0 0 0 0 0 0 |  next container ...

Why a GPU should not notice: the library registers each container by its address, and the driver
walks the entries up to the container's size. It finds what nvcc would have written had it been
asked for this architecture alone. Zeroing payloads under their headers would look simpler, but
cuobjdump 13.1 then fails ("Uncompress failed"), so drivers may too. Where nothing
in a container runs on the device, it gets the smallest entry of the library that does not run there
either: the driver then answers as for the original, that there is no code for this device, and not
that the container is damaged.

What only a device can tell: whether the driver looks at anything else, and how long the PTX takes
that is kept where there is no cubin. `gpu_bundle.py --originals` leaves libraries as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = ".nv_fatbin"
MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
EXACT_ARCHITECTURE = 0x100000  # the "a" of sm_90a

CONTAINER_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, size of entries
ENTRY_HEADER = struct.Struct("<HHIQ12xI8xQ")  # kind, version, header size, payload, sm, flags
ELF_HEADER = struct.Struct("<40xQ10xHHH")  # section table: offset, size of an entry, count, names
SECTION_HEADER = struct.Struct("<I20xQQ24x")  # name, offset, size


@dataclass(frozen=True)
class Entry:
    """Device code for one architecture.

    Attributes:
        kind: PTX, CUBIN, or a kind that this module does not know.
        sm: compute capability times ten, 90 for sm_90.
        exact: runs on this very architecture alone, as sm_90a does.
        start: offset of the entry's header.
        end: offset behind the padding of its payload.
    """

    kind: int
    sm: int
    exact: bool
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of header and payload."""
        return self.end - self.start

    def runs_on(self, sm: int) -> bool:
        """Whether a device of this architecture can run the code, PTX after compiling it."""
        if self.exact:
            return self.sm == sm
        if self.kind == CUBIN:
            return self.sm // 10 == sm // 10 and self.sm <= sm
        return self.sm <= sm


@dataclass(frozen=True)
class Container:
    """Device code of one translation unit.

    Attributes:
        start: offset of the container's header.
        entries: in the order of the file, back to back, the first behind the container's header.
    """

    start: int
    entries: tuple[Entry, ...]

    def usable(self, sm: int) -> list[Entry]:
        """Returns the cubins that run on this architecture, or else the PTX, and unknown kinds."""
        has_cubin = any(entry.kind == CUBIN and entry.runs_on(sm) for entry in self.entries)
        kind = CUBIN if has_cubin else PTX
        return [
            entry
            for entry in self.entries
            if entry.kind not in (PTX, CUBIN) or (entry.kind == kind and entry.runs_on(sm))
        ]


@dataclass(frozen=True)
class Slimmed:
    """What `keep_architecture` did to a library.

    Attributes:
        num_containers: in the library; 0 if it has no device code.
        num_usable: entries that run on the architecture.
        num_bytes: of the entries that stay.
        num_emptied_bytes: of those that went.
    """

    num_containers: int
    num_usable: int
    num_bytes: int
    num_emptied_bytes: int


def find_section(library: bytes | bytearray, name: str) -> tuple[int, int] | None:
    """Returns start and end of a section of a 64-bit little-endian ELF file, None without it."""
    if library[:6] != b"\x7fELF\x02\x01":
        return None
    table, entry_size, count, names_index = ELF_HEADER.unpack_from(library)
    headers = [
        SECTION_HEADER.unpack_from(library, table + index * entry_size) for index in range(count)
    ]
    if not headers:
        return None
    names_start = headers[names_index][1]
    wanted = name.encode() + b"\0"
    for name_offset, start, size in headers:
        name_start = names_start + name_offset
        if library[name_start : name_start + len(wanted)] == wanted:
            return start, start + size
    return None


def read_containers(library: bytes | bytearray) -> Iterator[Container]:
    """Yields the containers of a library; none where it has no device code.

    Raises:
        ValueError: where the section does not have the expected format.
    """
    section = find_section(library, SECTION)
    if section is None:
        return
    position, section_end = section
    while position < section_end:
        if not any(library[position : position + 8]):  # between containers
            position += 8
            continue
        start = position
        magic, _, header_size, entries_size = CONTAINER_HEADER.unpack_from(library, start)
        entries_start = start + header_size
        position = entries_start + entries_size
        if magic != MAGIC or position > section_end:
            raise ValueError(
                f"expected a container ({MAGIC:#x}) within {SECTION}, which ends at "
                f"{section_end:#x}, found {magic:#x} up to {position:#x}; use --originals"
            )
        yield Container(start, tuple(_read_entries(library, entries_start, position)))


def _read_entries(library: bytes | bytearray, start: int, end: int) -> Iterator[Entry]:
    """Yields the entries between two offsets, which they have to fill exactly."""
    while start < end:
        kind, _, header_size, payload_size, sm, flags = ENTRY_HEADER.unpack_from(library, start)
        entry_end = start + header_size + payload_size
        if header_size < ENTRY_HEADER.size or entry_end > end:
            raise ValueError(
                f"expected entries of {SECTION} up to {end:#x}, found one up to {entry_end:#x} "
                f"whose header has {header_size} bytes; use --originals"
            )
        yield Entry(kind, sm, bool(flags & EXACT_ARCHITECTURE), start, entry_end)
        start = entry_end


def keep_architecture(library: bytearray, sm: int) -> Slimmed:
    """Removes, in place, the entries that a device of this architecture does not use.

    Args:
        library: contents of an ELF file; its size does not change.
        sm: compute capability times ten, 90 for sm_90.

    Raises:
        ValueError: where the section of device code does not have the expected format.
    """
    containers = [container for container in read_containers(library) if container.entries]
    entries = [entry for container in containers for entry in container.entries]
    foreign = [entry for entry in entries if not entry.runs_on(sm)]
    smallest = min(foreign, key=lambda entry: entry.num_bytes, default=None)
    placeholder = bytes(library[smallest.start : smallest.end]) if smallest else b""
    num_usable = num_bytes = 0
    for container in containers:
        usable = container.usable(sm)
        kept = b"".join(bytes(library[entry.start : entry.end]) for entry in usable) or placeholder
        _rewrite(library, container, kept)
        num_usable += len(usable)
        num_bytes += len(kept)
    num_emptied_bytes = sum(entry.num_bytes for entry in entries) - num_bytes
    return Slimmed(len(containers), num_usable, num_bytes, num_emptied_bytes)


def _rewrite(library: bytearray, container: Container, entries: bytes) -> None:
    """Leaves only these entries in a container, and zeros behind them."""
    start, end = container.entries[0].start, container.entries[-1].end
    library[start:end] = entries + bytes(end - start - len(entries))
    magic, version, header_size, _ = CONTAINER_HEADER.unpack_from(library, container.start)
    CONTAINER_HEADER.pack_into(library, container.start, magic, version, header_size, len(entries))
