"""Reports, compilations and comparisons as text for a terminal."""
