"""HTTP: the API, its tokens, live events, metrics, pages. It reads and writes rows; runs outlive it."""
