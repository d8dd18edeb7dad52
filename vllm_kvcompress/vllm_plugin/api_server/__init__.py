"""The API server: statistics, the status page, and shorter prompts."""
