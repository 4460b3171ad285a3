"""Database records of jobs, written before they are announced: journal, reports, logs, tags and quotas."""
