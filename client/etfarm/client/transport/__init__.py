"""The connection to a farm: channels and stubs, retries, uploads and downloads, and the decoding of messages into models."""
