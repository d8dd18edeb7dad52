"""Measures what compression does to serving: stock and compressed engines serve loads in turns."""
