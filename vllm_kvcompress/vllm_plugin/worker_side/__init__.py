"""Worker processes: attention over pages, events, and the memory that they need."""
