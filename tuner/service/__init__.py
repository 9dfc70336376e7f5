"""The HTTP face of the tuner: the API for pipelines and the pages for people."""
