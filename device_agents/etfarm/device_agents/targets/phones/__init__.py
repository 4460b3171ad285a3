"""Phones that an adb server knows, as targets: what lies on them, what runs on them, and their coming and going."""
