"""Finds, for every GPU node, the vLLM configuration that serves a team's own traffic best."""

__version__ = "0.1.0"

# The environment variable in which a service gives its own version to the controllers that it starts.
SERVICE_VERSION = "TUNER_SERVICE_VERSION"
