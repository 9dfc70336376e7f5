"""What each `tuner` command does, a file a noun: read settings, call rooms, print. No logic of its own."""
