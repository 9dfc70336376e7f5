"""One file per noun of the API; each has a `router`."""
