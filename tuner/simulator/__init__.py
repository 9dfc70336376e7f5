"""The embedded engine and the predictor: one discrete-event scheduler core, run in virtual time to predict
and in real time behind vLLM's HTTP interface to serve.
"""
