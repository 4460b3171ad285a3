"""The servicers, one module for each service of the contract. They translate between messages and the packages below."""
