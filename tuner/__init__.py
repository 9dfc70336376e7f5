"""Finds, for every GPU node, the vLLM configuration that serves a team's own traffic best."""

__version__ = "0.1.0"
