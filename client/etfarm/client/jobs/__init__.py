"""Jobs after their submission: waiting, reports and their files, history and comparisons."""
