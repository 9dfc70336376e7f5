"""What a vLLM command line costs: findings on its flags, its memory, and the traffic that it has to serve."""
