"""Properties are checked without a clock: machines that run tests are often busy."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Inductor keeps what it generated, in steps as long as vectors are, by the graph alone: a run that
# is capped compiles that for shorter vectors, and half of every step is never computed.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
