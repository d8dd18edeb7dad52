"""The observation window's attention to each entry (SnapKV)."""
