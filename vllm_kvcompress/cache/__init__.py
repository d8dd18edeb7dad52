"""Where tokens, pages, queries and what policies carry lie in vLLM's blocks."""
