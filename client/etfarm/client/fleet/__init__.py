"""Reservations of devices, and watches of all devices and jobs."""
