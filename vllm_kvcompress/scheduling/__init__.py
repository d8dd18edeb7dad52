"""When requests are compressed, and down to how many blocks: arithmetic, without torch and vLLM."""
