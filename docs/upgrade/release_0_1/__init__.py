"""The messages of etfarm 0.1 and their conversion: databases and agents' data folders hold serialized ones.

`messages.binpb` is the google.protobuf.FileDescriptorSet of etfarm.v1 as 0.1 had it, without the services' messages that are
never stored. It is frozen: later changes of the .proto files need an entry in `tables`, not a new file.
"""
