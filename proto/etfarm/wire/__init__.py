"""What both ends of the contract need to speak it. Importing it loads neither numpy nor gRPC."""
