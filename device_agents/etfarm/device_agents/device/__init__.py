"""Facts of a device: processors, memory, system and sensors, read from this machine's files or from a phone's shell."""
