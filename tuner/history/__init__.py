"""What happened, in SQL: the only room that knows tables. It takes and gives frozen records."""
