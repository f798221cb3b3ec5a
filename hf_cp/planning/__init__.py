"""What a run will need, computed before it runs: memory, bytes sent and time, from integers and a few rates."""
