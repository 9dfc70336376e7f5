"""The simulated engine and the predictor: one discrete-event scheduler, which runs in virtual time to predict
and in real time behind vLLM's HTTP interface to serve.
"""
