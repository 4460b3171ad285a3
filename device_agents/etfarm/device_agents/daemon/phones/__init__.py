"""Phones as devices of the agent: `fleet` follows the adb server's list, `trial` tests the runner on a new phone."""
