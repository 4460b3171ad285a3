"""Descriptions of finished programs: their inputs, outputs, operators, sizes, and the memory that each module uses."""
