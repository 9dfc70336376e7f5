"""Measures: sends a slice of a trace at its real times, stamps every token, and checks that the measurement
itself can be trusted. No other room sends load.
"""
