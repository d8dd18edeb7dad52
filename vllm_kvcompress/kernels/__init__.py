"""Operators over pages and over a layer's keys and values: a folder for each."""
