"""Whetherman Edge: forecasts, before every model call that offers tools, whether a tool is needed at all."""

__version__ = "0.1.0"
