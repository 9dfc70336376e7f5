"""Recording live traffic without keeping a word of it: a middleware, a proxy around it, files that rotate."""
