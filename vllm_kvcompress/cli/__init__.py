"""The command line: `vllm-kvcompress serve`, `policies`, `profile`, `doctor`."""
