"""The terminal itself: its capabilities, plain and live output, progress lines."""
