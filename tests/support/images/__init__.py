"""Disk images of emulated Arm boards and phones, made from Debian's packages; no root, no loop mounts, no debootstrap.

`python -m tests.support.images board|phone` makes one and says where it is. Images are kept outside of the checkout under a
digest of everything that they are made from here; the packages are the newest of their release when an image is made.
"""
