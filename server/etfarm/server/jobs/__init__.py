"""Jobs: what is submitted, the states its cells go through, the journal that every change is written to first."""
