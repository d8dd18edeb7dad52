"""vLLM's own Triton attention over the same pages, to compare with.

Only its two source files are loaded, since importing vllm asks for extensions that are built for
the machine's platform. Every (request, KV head) is a sequence with one KV head.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries

FOLDER = Path("v1", "attention", "ops")
FILES = ("triton_attention_helpers", "triton_unified_attention")
# As in vLLM's triton_attn.py: fewer sequences than these are split into so many segments.
SPLIT_BELOW = 128
SEGMENTS = 16


class KVQuantMode(enum.IntEnum):
    """The modes that vLLM's kernel names."""

    NONE = 0
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def why_not() -> str | None:
    """Returns why vLLM's kernel cannot be used here; None if it can."""
    try:
        unified_attention()
    except Exception as error:  # of another vLLM, whose files may do anything
        return f"no comparison with vLLM's kernel: {type(error).__name__}: {error}"
    return None


@functools.cache
def unified_attention() -> Callable[..., None]:
    """vLLM's launcher, from the sources of the vllm that Python finds.

    Raises:
        ImportError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ImportError("vllm is not on Python's path")
    folder = Path(next(iter(places))) / FOLDER
    with _stand_ins():
        for name in FILES:
            module = _load(f"vllm.v1.attention.ops.{name}", folder / f"{name}.py")
    launcher: Callable[..., None] = module.unified_attention
    return launcher


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"vllm has no {path}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Replaces what the two files import from the rest of vLLM until they are loaded."""
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda number: False
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }
    before = {name: module for name, module in sys.modules.items() if _is_vllm(name)}
    for name, content in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_vllm(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"


def vllm_attention(entries: PagedEntries, queries: Tensor, scale: float) -> Callable[[], Tensor]:
    """A launch of vLLM's kernel: attention of the last m entries' queries, causal among these.

    Args:
        entries: of which the last m are the queries' own; all page ids must be in the cache.
        queries: [S, m, G, D] contiguous, in the pages' type.
        scale: softmax scale.

    Returns:
        What launches it, and returns [S, m, G, D].
    """
    num_sequences, num_queries, group, dims = queries.shape
    device = entries.device
    rows = entries.pages.view(-1, entries.block_size, 1, 2 * dims)
    keys, values = rows.split(dims, dim=-1)
    flat = queries.flatten(0, 1)
    out = torch.empty_like(flat)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * num_queries
    segments = (SPLIT_BELOW, group, SEGMENTS)
    padded = triton.next_power_of_2(dims)
    launch = functools.partial(
        unified_attention(),
        q=flat,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=num_queries,
        seqused_k=entries.flat_lengths,
        max_seqlen_k=entries.capacity,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1),
        block_table=entries.page_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=SPLIT_BELOW,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.empty(*segments, padded, device=device),
        softmax_segm_max=torch.empty(segments, device=device),
        softmax_segm_expsum=torch.empty(segments, device=device),
    )

    def work() -> Tensor:
        launch()
        return out.view_as(queries)

    return work
