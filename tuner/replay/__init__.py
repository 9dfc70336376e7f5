"""The ruler: sends a slice of a trace on its real timestamps, stamps every token, folds outcomes into
numbers and says whether they are to be believed. The only room that sends load.
"""
