"""What the farm keeps: which artifacts something refers to, and the deletion of old jobs, logs, cached results and artifacts."""
