"""Records live traffic without its text: a middleware, a proxy, and files that rotate."""
