"""Artifacts in a bucket of S3, or of a server that speaks its protocol; files of this machine are copies."""
