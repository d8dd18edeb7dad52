"""The command line: `vllm-kvcompress serve`, `policies`, `profile`, `train-reference`, `doctor`."""
