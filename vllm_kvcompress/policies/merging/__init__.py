"""Policies that merge or summarise what they evict: one file for every paper."""
