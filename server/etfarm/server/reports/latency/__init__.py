"""The statistics of timed samples: summaries, paired comparisons of interleaved runs, and the thresholds of a verdict."""
