"""The engine room: one process tree, whatever it does."""
