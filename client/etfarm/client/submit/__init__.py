"""Everything that turns a user's model, inputs and recipes into a submission, before the farm is asked to do anything."""
