"""The C++ runner's sources, and `etfarm bundle build`, which builds a bundle from them."""
