"""The decision, pure: values in, values out; no I/O, no clock, no logging."""
