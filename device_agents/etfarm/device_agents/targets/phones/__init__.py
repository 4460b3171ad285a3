"""Android phones as targets, over adb: `phone` is the target, `folder` the agent's files on it, `runner` a runner process.

`claim` makes this agent the only one that uses a phone, and `alive` ends work on a phone that died.
"""
