"""Finds, for every GPU node, the vLLM configuration that serves a team's own traffic best."""

__version__ = "0.1.0"
SERVICE_VERSION = "TUNER_SERVICE_VERSION"
"""Where a service tells the controllers that it starts which version it is."""
