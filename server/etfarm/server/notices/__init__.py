"""Notices of the farm's events over HTTP: webhooks, the stored outbox, and the delivery in threads of its own."""
