"""What the database keeps of jobs, written before it is announced: journal, reports, logs, tags and quotas."""
