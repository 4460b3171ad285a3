"""The code that both ends of the gRPC contract share. Importing it loads neither numpy nor gRPC."""
