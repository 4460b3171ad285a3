"""Targets: what a program runs on. `base` is the interface, `local` this machine or an emulated processor, `phones` Android."""
