"""From a screened model to a .pte: what runs in the jailed children, and the stdlib-only screens around it."""
