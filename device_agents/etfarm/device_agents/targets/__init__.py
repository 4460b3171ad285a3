"""Targets, on which programs run. `base` is the interface, `local` this machine or an emulated processor, `phones` Android."""
