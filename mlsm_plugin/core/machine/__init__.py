"""This machine: the memory that glibc keeps, how threads wait, and the device and precision of models."""
