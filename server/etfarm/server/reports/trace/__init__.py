"""A traced run by operator: reads ETDump, ETRecord and program, attributes each kernel's time to the user's modules and lines."""
