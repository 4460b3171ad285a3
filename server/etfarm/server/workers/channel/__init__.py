"""The daemon's connection to one child: frames, and what the child writes into them."""
