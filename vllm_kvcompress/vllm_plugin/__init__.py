"""The guest side: everything that touches vLLM.

`register` is vLLM's general-plugin hook. It runs in every process, more than once, and does
almost nothing: compression is switched on by the scheduler and worker classes that the command
line names, so a server without them is stock vLLM.
"""


def register() -> None:
    """Makes the KV-cache spec known to vLLM in this process; repeatable."""
    from vllm_kvcompress.vllm_plugin.startup import lifeline
    from vllm_kvcompress.vllm_plugin.startup.versions import check_vllm_version

    lifeline.follow()
    check_vllm_version()
    from vllm_kvcompress.vllm_plugin.scheduler_side import block_manager  # noqa: F401  (registers)
