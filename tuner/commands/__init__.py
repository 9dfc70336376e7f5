"""What each `tuner` command does, a file a noun: read settings, call the rooms, print. No logic of its own."""
