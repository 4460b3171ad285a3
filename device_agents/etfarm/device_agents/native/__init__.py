"""The C++ runner's sources, and `etfarm bundle build`, which makes a bundle of them."""
