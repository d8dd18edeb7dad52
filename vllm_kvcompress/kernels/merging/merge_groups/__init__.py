"""Groups of neighbours, merged."""
