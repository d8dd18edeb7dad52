"""Notes which files of this package a request goes through, in the order in which it first does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import vllm_kvcompress

PACKAGE = Path(vllm_kvcompress.__file__).parent


def note_files(report: dict[str, Any]) -> None:
    """From the first request on, in `report["trail"]`; called before the engine starts."""
    trail: dict[str, None] = {}
    began = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal began
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        if not began:
            began = code.co_name == "validate_params"
        if began and file not in trail:
            trail[file] = None
            report["trail"] = list(trail)

    sys.setprofile(note)
