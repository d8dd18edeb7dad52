"""The last queries of requests, which policies look at: beside the cache, or in its blocks."""
