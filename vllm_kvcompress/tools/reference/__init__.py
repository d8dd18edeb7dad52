"""The reference model: a small Llama trained on synthetic retrieval tasks."""
