"""Step 9: from a device's samples, outputs and trace to a report; all but `verdict` runs in a jailed child."""
